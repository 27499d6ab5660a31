"""Composes the runner of a model: what differs between devices, and between ranks."""

from collections.abc import Mapping
from typing import Literal

from pdserve_engine.kv.kv_cache import KVCache
from pdserve_engine.models.base import Model, ModelPart
from pdserve_engine.runner.run.encoder_cache import EncoderCache
from pdserve_engine.runner.run.input_batch import InputBatch
from pdserve_engine.runner.run.model_runner import ModelRunner
from pdserve_engine.runner.run.step_inputs import StepInputs
from pdserve_engine.runner.run.stepper import EagerStepper, Stepper
from pdserve_engine.runner.sample.pooling_sampler import PoolingSampler
from pdserve_engine.runner.sample.rank_samplers import (
    FollowerSampler,
    LeaderSampler,
    NoSampling,
    StageSampler,
)
from pdserve_engine.runner.sample.sampler import Sampler, TokenSampler
from pdserve_engine.sampling.processors import NO_PROCESSORS, LogitsProcessorFactory
from pdserve_engine.sampling.state import FollowedSampling, SamplingState

# What a rank does with the states of a step: it has them all, leads or follows those that have the
# other heads, or hands them to the next stage.
Role = Literal["whole", "leader", "follower", "stage"]


def make_runner(
    model: Model,
    kv_cache: KVCache,
    *,
    max_num_seqs: int,
    max_model_len: int,
    logits_processors: Mapping[str, LogitsProcessorFactory] = NO_PROCESSORS,
    on_cuda: bool | None = None,
) -> ModelRunner:
    """Return the runner of a model, or of a rank's part of one. Unless it is said the model's
    device decides whether it runs steps as on CUDA, which needs Triton.
    """
    if on_cuda is None:
        on_cuda = model.device.type == "cuda"
    role = _role_of(model)
    spec, device = kv_cache.spec, model.device
    batch = InputBatch(
        _state_class(role, on_cuda=on_cuda)(
            max_num_seqs=max_num_seqs,
            vocab_size=model.config.vocab_size,
            device=device,
            logits_processors=logits_processors,
        ),
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        block_size=spec.block_size,
        num_groups=len(spec.groups),
    )
    encoder_cache = EncoderCache()
    inputs = StepInputs(batch, kv_cache, encoder_cache, device)
    return ModelRunner(
        model,
        kv_cache,
        batch=batch,
        encoder_cache=encoder_cache,
        stepper=_make_cuda_stepper(model, inputs, role) if on_cuda else EagerStepper(inputs),
        sampler=_make_sampler(model, batch, role),
    )


def _role_of(model: Model) -> Role:
    if not isinstance(model, ModelPart):
        return "whole"
    if not model.stage.is_last:
        return "stage"
    if model.group is None:
        return "whole"
    return "leader" if model.group.rank == 0 else "follower"


def _state_class(role: Role, *, on_cuda: bool) -> type[SamplingState]:
    if role in ("whole", "leader"):
        return SamplingState
    return FollowedSampling if on_cuda else NoSampling


def _make_sampler(model: Model, batch: InputBatch, role: Role) -> Sampler:
    if model.config.pooler is not None:
        return PoolingSampler(model.config, batch, model.device)
    if role == "stage":
        return StageSampler()
    if role == "follower":
        return FollowerSampler(batch)
    return (LeaderSampler if role == "leader" else TokenSampler)(batch, model.device)


def _make_cuda_stepper(model: Model, inputs: StepInputs, role: Role) -> Stepper:
    # They need Triton.
    from pdserve_engine.runner.run.cuda_stepper import CudaStepper
    from pdserve_engine.runner.sample.device_sampler import NoDraws, PartSampler, WholeSampler

    if model.config.pooler is not None:
        return CudaStepper(inputs, NoDraws(model.config.pooler))
    return CudaStepper(inputs, (WholeSampler if role == "whole" else PartSampler)(inputs.batch))
