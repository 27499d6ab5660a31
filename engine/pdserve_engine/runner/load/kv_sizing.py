"""How large the KV pool may be and how long requests in it, from what memory there is."""

import bisect
import dataclasses
import logging
import math

import torch

from pdserve_common.types.engine import EngineCoreRequest, Generate, MultiModalFeatureSpec, Pool
from pdserve_common.types.engine_client import NO_TENSORS, Tensors
from pdserve_common.types.pooling_params import PoolingParams
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_common.types.tensors import tensor_ref
from pdserve_engine.config import EngineConfig
from pdserve_engine.core.scheduler import Scheduler
from pdserve_engine.kv.block_pool import BlockPool
from pdserve_engine.kv.kv_cache import KVCache, KVCacheSpec
from pdserve_engine.kv.kv_cache_manager import KVCacheManager
from pdserve_engine.kv.memory import (
    available_host_bytes,
    peak_growth,
    release_unused,
    used_bytes,
)
from pdserve_engine.models.base import Model
from pdserve_engine.models.config import VisionConfig
from pdserve_engine.request.request import Request
from pdserve_engine.runner.draft.drafter import DraftModel
from pdserve_engine.runner.load.make_runner import make_runner
from pdserve_engine.runner.run.model_runner import ModelRunner

logger = logging.getLogger(__name__)

# A CPU pool of no given size: what one request of the model's full length takes, within these
# bounds and a share of what is free.
MIN_AUTO_CPU_BYTES = 256 << 20
MAX_AUTO_CPU_BYTES = 4 << 30
AUTO_CPU_SHARE = 0.25
# Output tokens of the largest step's requests: of a prompt and of a decode, and with a draft model
# of those that it guesses.
NUM_WARM_UP_TOKENS = 2
NUM_DRAFT_WARM_UP_TOKENS = 4


def make_kv_cache_manager(
    config: EngineConfig, spec: KVCacheSpec, num_blocks: int, *, max_concurrent_batches: int
) -> KVCacheManager:
    """Return the book-keeping of a pool, for as many steps in flight as the executor allows."""
    return KVCacheManager(
        BlockPool(num_blocks, enable_caching=config.enable_prefix_caching),
        config.block_size,
        spec.windows,
        max_tokens_in_flight=max_concurrent_batches * config.scheduler.max_num_batched_tokens,
    )


def measure_largest_step(
    config: EngineConfig,
    model: Model,
    spec: KVCacheSpec,
    device: torch.device,
    draft: DraftModel | None = None,
) -> int:
    """Compute the largest step there can be, in a pool of its own, and return how many bytes it
    took at its peak besides weights and pool. What it initialises stays so: it is the warm-up.
    """
    num_outputs = NUM_WARM_UP_TOKENS if draft is None else NUM_DRAFT_WARM_UP_TOKENS
    if model.config.pooler is not None:
        num_outputs = 0
    lengths = _prompt_lengths(config, model.config.max_model_len - num_outputs)
    if model.config.vision is not None:  # in several steps if need be
        lengths[0] = max(lengths[0], model.config.vision.num_image_tokens)
    arithmetic = make_kv_cache_manager(config, spec, 1, max_concurrent_batches=1)
    # Admission holds blocks back for what runs already: up to two a request and group.
    num_blocks = 2 * arithmetic.num_groups * len(lengths)
    num_blocks += sum(arithmetic.num_blocks_needed(length + num_outputs) for length in lengths)
    pool = KVCache(spec, num_blocks=num_blocks, device=device)
    max_model_len = model.config.max_model_len
    scheduler = _make_plain_scheduler(config, pool, model.config.vision)
    runner = make_runner(
        model, pool, max_num_seqs=scheduler.config.max_num_seqs, max_model_len=max_model_len
    )
    try:
        if config.has_adapters:
            runner.reserve_adapters(config.max_loras, config.max_lora_rank)
        if draft is not None:
            runner.use_draft_model(draft, scheduler.config.max_num_batched_tokens)
        for index, length in enumerate(lengths):
            request = _warm_up_request(f"warm-up-{index}", length, num_outputs, model)
            vision, tensors = model.config.vision, NO_TENSORS
            if vision is not None and length >= vision.num_image_tokens:
                request, tensors = _with_picture(request, vision)
            scheduler.add_request(
                Request(request, max_model_len=max_model_len, seed=0, tensors=tensors)
            )

        def run() -> None:
            # Without an EngineCore, which would serve on after a step that fails.
            while scheduler.has_requests():
                output = runner.execute_model(scheduler.schedule()).get_output()
                scheduler.update_from_output(output, 0.0)

        runner.warm_up()
        growth = peak_growth(device, run)
        return growth + _graph_bytes(runner, device)
    finally:
        pool.close()
        runner.close()


def _graph_bytes(runner: ModelRunner, device: torch.device) -> int:
    """Return what the runner's graphs take of a GPU, and give it back."""
    if device.type != "cuda":
        return 0
    release_unused(device)
    before = used_bytes(device)
    runner.capture_graphs()
    num_bytes = used_bytes(device) - before
    runner.release_graphs()
    release_unused(device)
    return num_bytes


def num_blocks_that_fit(
    config: EngineConfig,
    spec: KVCacheSpec,
    device: torch.device,
    *,
    max_model_len: int,
    max_concurrent_batches: int,
    step: int,
    adapters: int = 0,
    pictures: int = 0,
    draft_spec: KVCacheSpec | None = None,
) -> int:
    """Return the size of the pool: as configured, or as large as is sensible. The weights are
    loaded; `step` is the number of bytes that steps take at their peak, `adapters` that of as many
    as there may be, `pictures` that of those that are kept. A draft model's blocks, and those that
    it has for itself, are in the same memory.

    Raises ValueError, with the numbers, if there is no room for it.
    """
    draft_bytes = 0 if draft_spec is None else draft_spec.block_bytes
    block_bytes = spec.block_bytes + draft_bytes
    num_spare_bytes = draft_bytes * config.scheduler.max_batch_size
    room = max(0, _room(config, device) - step - adapters - pictures - num_spare_bytes)
    if config.num_blocks is not None:
        wanted = config.num_blocks * block_bytes
    elif config.kv_cache_memory_mib is not None:
        wanted = config.kv_cache_memory_mib << 20
    elif device.type == "cuda":
        wanted = room
    else:
        arithmetic = make_kv_cache_manager(
            config, spec, 1, max_concurrent_batches=max_concurrent_batches
        )
        one_request = arithmetic.num_blocks_needed(max_model_len) * block_bytes
        wanted = _auto_cpu_bytes(one_request, room)
    wanted = max(wanted, block_bytes)
    if wanted > room:
        raise ValueError(
            f"the KV pool of {wanted / 2**20:.1f} MiB does not fit: {room / 2**20:.1f} MiB are "
            f"left of the memory after the weights, {step / 2**20:.0f} MiB for a step and "
            f"{(adapters + pictures) / 2**20:.0f} MiB for adapters and pictures: lower "
            "--kv-cache-memory-mib, --num-blocks, --max-num-batched-tokens, --max-num-seqs or "
            "--max-loras"
        )
    return config.num_blocks or spec.num_blocks_for_budget(wanted * spec.block_bytes // block_bytes)


def fit_max_model_len(config: EngineConfig, max_model_len: int, kv: KVCacheManager) -> int:
    """Return max_model_len, or less where it is the model's own and the pool holds less: one
    request of that length has to fit, or it could never finish. Raises ValueError if it was asked
    for.
    """
    num_blocks, num_needed = kv.block_pool.num_blocks, kv.num_blocks_needed(max_model_len)
    if num_needed <= num_blocks:
        return max_model_len
    lengths = range(max_model_len + 1)
    fitting = bisect.bisect_right(lengths, num_blocks, key=kv.num_blocks_needed) - 1
    what = (
        f"a request of max_model_len ({max_model_len}) may take {num_needed} KV blocks, the pool "
        f"has {num_blocks} of {config.block_size} tokens: {fitting} tokens fit"
    )
    if config.max_model_len is not None or fitting < 2:
        raise ValueError(f"{what}; raise --kv-cache-memory-mib or lower --max-model-len")
    logger.warning("%s, so max_model_len is %d; --kv-cache-memory-mib raises it", what, fitting)
    return fitting


def _prompt_lengths(config: EngineConfig, longest: int) -> list[int]:
    """Prompts that fill a step, as many and, of those, as long as may be."""
    num_left, lengths = config.scheduler.max_num_batched_tokens, []
    for num_after in reversed(range(min(config.scheduler.max_batch_size, num_left))):
        length = max(1, min(longest, num_left - num_after))
        lengths.append(length)
        num_left -= length
    return lengths


def _warm_up_request(
    request_id: str, num_tokens: int, num_outputs: int, model: Model
) -> EngineCoreRequest:
    token_ids = (0,) * num_tokens
    task: Generate | Pool
    if (pooler := model.config.pooler) is not None:
        task = Pool(PoolingParams(task=pooler.tasks[0]))
    else:
        params = SamplingParams(temperature=1.0, seed=0, max_tokens=num_outputs, ignore_eos=True)
        task = Generate(params)
    return EngineCoreRequest(request_id=request_id, prompt_token_ids=token_ids, task=task)


def _with_picture(
    request: EngineCoreRequest, vision: VisionConfig
) -> tuple[EngineCoreRequest, Tensors]:
    """Return a request that begins with a black picture, and its pixels."""
    shape = (vision.image_size, vision.image_size, 3)
    pixels, length = bytes(math.prod(shape)), vision.num_image_tokens
    data = tensor_ref("uint8", shape, pixels)
    feature = MultiModalFeatureSpec(
        modality="image",
        identifier=data.content_hash.hex(),
        position=0,
        length=length,
        data=data,
    )
    token_ids = (vision.image_token_id,) * length + request.prompt_token_ids[length:]
    request = dataclasses.replace(request, prompt_token_ids=token_ids, mm_features=(feature,))
    return request, {data.content_hash: pixels}


def _make_plain_scheduler(
    config: EngineConfig, pool: KVCache, vision: VisionConfig | None
) -> Scheduler:
    """One that admits everything at once and shares nothing."""
    settings = dataclasses.replace(
        config.scheduler,
        scheduling_mode="v1",
        enable_chunked_prefill=True,
        long_prefill_token_threshold=0,
        max_num_seqs=config.scheduler.max_batch_size,
        max_num_partial_prefills=config.scheduler.max_batch_size,
        kv_watermark=0.0,
    )
    plain = dataclasses.replace(
        config,
        enable_prefix_caching=False,
        kv_offload_host_bytes=0,
        kv_offload_disk_path=None,
        kv_offload_disk_bytes=0,
    )
    manager = make_kv_cache_manager(plain, pool.spec, pool.num_blocks, max_concurrent_batches=1)
    return Scheduler(settings, manager, vision=vision)


def _room(config: EngineConfig, device: torch.device) -> int:
    """Bytes that may still be taken."""
    if device.type == "cuda":
        _, total = torch.cuda.mem_get_info(device)
        return int(total * config.gpu_memory_utilization) - used_bytes(device)
    return available_host_bytes()


def _auto_cpu_bytes(one_request: int, room: int) -> int:
    wanted = min(max(one_request, MIN_AUTO_CPU_BYTES), MAX_AUTO_CPU_BYTES)
    return min(wanted, int(room * AUTO_CPU_SHARE))
