"""Engines whose model sees pictures: the tokens of transformers' own model, whatever else runs."""

import dataclasses
import itertools
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdserve_common.types.engine import EngineCoreOutput, ErrorCode, Generate, LogprobsLists
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_engine.models.base import ForwardInputs
from pdserve_engine.models.config import ModelError, VisionConfig
from pdserve_engine.models.registry import load_model, read_model_config
from pdserve_engine.request.sched_output import SchedulerOutput
from support.engines import load, run_to_end
from support.models import LLAVA, NUM_IMAGE_TOKENS
from support.pictures import Picture, Prompt, hf_greedy
from support.samples import sampled

BLOCK_SIZE = 4
NUM_OUTPUT = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT, ignore_eos=True)
A, B, C = map(Picture, range(3))
PROMPTS = {
    "text alone": Prompt([5, 6, 7, 8, 9]),
    "text before and behind": Prompt([5, 6, 7], A, [8, 9]),
    "at the start": Prompt(A, [5]),
    "at the end": Prompt([5, 6], B),
    "one after the other": Prompt([7], A, B, [8]),
    "with text between": Prompt([7, 8], A, [9, 10, 11], B, [12], C, [13, 14]),
    "twice the same": Prompt([9], A, [5], A, [6]),
    "two others": Prompt([5, 6, 7], C, [8, 9]),
}
# What is special about a model.
MODELS: dict[str, dict[str, Any]] = {
    "llama, clip": {},
    "mistral, siglip": {"text": "MistralForCausalLM", "tower": "SiglipVisionConfig"},
    "mistral with a window": {"text": "MistralForCausalLM", "sliding_window": 24},
    "qwen2, tied, two layers of the tower": {
        "text": "Qwen2ForCausalLM",
        "tie_word_embeddings": True,
        "vision_feature_layer": [-2, -1],
    },
    "qwen3": {"text": "Qwen3ForCausalLM"},
}
WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "in chunks": {"max_num_batched_tokens": 7},
    "in chunks, several prompts": {"max_num_batched_tokens": 11, "max_num_partial_prefills": 4},
    "async": {"async_scheduling": True, "max_num_batched_tokens": 21},
    "v0": {"scheduling_mode": "v0", "max_num_batched_tokens": 96},
    "preempted": {"num_blocks": 26, "enable_prefix_caching": False},
    "few blocks, async": {
        "num_blocks": 26,
        "async_scheduling": True,
        "max_num_batched_tokens": 19,
    },
    "with drafts": {"speculation": "suffix", "max_num_batched_tokens": 13},
}


class Engine:
    """An engine, which is stepped by hand."""

    def __init__(self, model: Path, **fields: Any) -> None:
        settings = {"block_size": BLOCK_SIZE, "num_blocks": 300, "max_model_len": 96}
        self.loaded = load(model, **{**settings, "async_scheduling": False, **fields})
        self.core = self.loaded.core
        self.outputs: dict[str, list[EngineCoreOutput]] = {}

    def add(self, name: str, prompt: Prompt, **fields: Any) -> None:
        tensors = fields.pop("tensors", prompt.tensors)
        self.core.add_request(prompt.request(name, task=Generate(GREEDY), **fields), tensors)

    def run(self) -> dict[str, list[int]]:
        """Return the tokens of what was added."""
        self.outputs = run_to_end(self.core)
        return {
            name: [token_id for output in outputs for token_id in output.new_token_ids]
            for name, outputs in self.outputs.items()
        }

    def num_cached(self, name: str) -> int:
        stats = self.outputs[name][0].prefill_stats
        assert stats is not None
        return stats.num_cached_tokens


@pytest.fixture
def start() -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(model: Path, **fields: Any) -> Engine:
        engines.append(Engine(model, **fields))
        return engines[-1]

    yield make
    for engine in engines:
        pool = engine.core.scheduler.kv.block_pool
        assert pool.num_free_blocks == pool.num_blocks
        engine.loaded.close()


@pytest.fixture(scope="module")
def model(make_served_model: Callable[..., Path]) -> Path:
    return make_served_model(LLAVA)


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, list[int]]:
    return {name: hf_greedy(model, prompt, NUM_OUTPUT) for name, prompt in PROMPTS.items()}


@pytest.mark.parametrize("name", sampled(MODELS, *list(MODELS)[:4]))
def test_tokens_are_those_of_transformers(
    make_served_model: Callable[..., Path], start: Callable[..., Engine], name: str
) -> None:
    model = make_served_model(LLAVA, **MODELS[name])
    engine = start(model)
    assert engine.loaded.info.modalities == ("image",)
    for each, prompt in PROMPTS.items():
        engine.add(each, prompt)
    assert engine.run() == {each: hf_greedy(model, p, NUM_OUTPUT) for each, p in PROMPTS.items()}


@pytest.mark.parametrize(
    "way", sampled(WAYS, "in chunks", "async", "v0", "preempted", "with drafts")
)
def test_they_are_the_same_in_every_way_to_run(
    model: Path, expected: dict[str, list[int]], start: Callable[..., Engine], way: str
) -> None:
    engine = start(model, **WAYS[way])
    for attempt in range(2):
        for name, prompt in PROMPTS.items():
            engine.add(name, prompt)
        assert engine.run() == expected, attempt
    if way == "preempted":
        assert engine.core.scheduler.num_preemptions


def test_bits_depend_on_no_other_picture_and_no_chunk(
    model: Path, start: Callable[..., Engine]
) -> None:
    answers = []
    for fields in ({"enable_prefix_caching": False}, {"max_num_batched_tokens": 9}):
        engine = start(model, dtype="bfloat16", block_size=16, num_blocks=80, **fields)
        assert engine.loaded.info.determinism == "exact"
        is_alone = not answers
        found: dict[str, list[Any]] = {}
        for name, prompt in PROMPTS.items():
            params = dataclasses.replace(GREEDY, logprobs=3, prompt_logprobs=1)
            engine.core.add_request(prompt.request(name, task=Generate(params)), prompt.tensors)
            if is_alone:
                engine.run()
                found |= bits_of(engine)
        engine.run()
        answers.append(found | bits_of(engine))
    assert answers[0] == answers[1]
    assert answers[0].keys() == PROMPTS.keys()


def bits_of(engine: Engine) -> dict[str, list[Any]]:
    """Return all log-probabilities of what has just run."""
    return {
        name: [
            list(itertools.chain.from_iterable(lists.logprobs))
            for kind in ("new_prompt_logprobs", "new_logprobs")
            for lists in [join(getattr(output, kind) for output in outputs)]
        ]
        for name, outputs in engine.outputs.items()
    }


def join(parts: Iterable[LogprobsLists | None]) -> LogprobsLists:
    return LogprobsLists.join(part for part in parts if part is not None)


# ---- the prefix cache


def test_a_hit_may_begin_within_a_picture(model: Path, start: Callable[..., Engine]) -> None:
    engine = start(model)
    first, second = Prompt([5, 6, 7], A, [8, 9]), Prompt([5, 6, 7], A, B, [10, 11])
    for name, prompt, num_cached in (("first", first, 0), ("second", second, 16)):
        engine.add(name, prompt)
        assert engine.run()[name] == hf_greedy(model, prompt, NUM_OUTPUT)
        assert engine.num_cached(name) == num_cached
    # Again, when it was not kept.
    engine.core.scheduler.encoder_cache.reset()
    engine.add("again", first)
    assert engine.run()["again"] == hf_greedy(model, first, NUM_OUTPUT)
    assert engine.num_cached("again") == 20


def test_another_picture_shares_no_block_of_it_or_behind_it(
    model: Path, start: Callable[..., Engine]
) -> None:
    engine = start(model)
    for number, picture in enumerate((A, B, C)):
        prompt = Prompt([5, 6, 7, 8, 9], picture, [10, 11, 12, 13])
        engine.add(str(number), prompt)
        assert engine.run()[str(number)] == hf_greedy(model, prompt, NUM_OUTPUT)
        assert engine.num_cached(str(number)) == (4 if number else 0)


def test_forks_share_what_is_computed_of_a_picture(
    model: Path, start: Callable[..., Engine]
) -> None:
    engine = start(model, max_num_batched_tokens=2 * NUM_IMAGE_TOKENS)
    encoded = count_encoded(engine)
    prompt = Prompt([5, 6, 7], A)  # its last block ends within the picture
    for name in ("source", "fork", "other fork"):
        engine.add(name, prompt, fork_of=None if name == "source" else "source")
    other = Prompt([5, 6, 7], B)
    engine.add("another picture", other, fork_of="source")
    tokens = engine.run()
    assert tokens.pop("another picture") == hf_greedy(model, other, NUM_OUTPUT)
    assert list(tokens.values()) == [hf_greedy(model, prompt, NUM_OUTPUT)] * 3
    assert engine.num_cached("fork") == engine.num_cached("other fork") == 16
    assert engine.num_cached("another picture") == 0
    assert len(encoded) == 2


def count_encoded(engine: Engine) -> list[str]:
    """Return the pictures that are embedded from now on, as they come."""
    encoded: list[str] = []
    executor: Any = engine.core.executor
    execute = executor.rank.execute_model

    def count(step: SchedulerOutput) -> Any:
        encoded.extend(step.scheduled_encoder_inputs)
        return execute(step)

    executor.rank.execute_model = count
    return encoded


def test_a_picture_is_embedded_once_while_it_is_kept(
    model: Path, start: Callable[..., Engine]
) -> None:
    engine = start(model, max_num_batched_tokens=NUM_IMAGE_TOKENS, enable_prefix_caching=False)
    encoded = count_encoded(engine)
    for round_, picture in enumerate((A, A, B, A)):  # there is room for one
        engine.add(str(round_), Prompt([5, round_ + 6], picture, [9]))
        engine.run()
    assert len(encoded) == 3


def test_a_step_that_fails_leaves_no_picture_that_is_not_there(
    model: Path, expected: dict[str, list[int]], start: Callable[..., Engine]
) -> None:
    engine = start(model, max_num_batched_tokens=23)
    runner: Any = engine.core.executor.rank.runner  # type: ignore[attr-defined]
    forward, faults = runner.model.forward, iter([False, True, False, False, True])

    def fail(inputs: ForwardInputs) -> Any:
        if next(faults, False):
            raise RuntimeError("a passing fault")
        return forward(inputs)

    runner.model.forward = fail
    for name, prompt in PROMPTS.items():
        engine.add(name, prompt)
    found = engine.run()
    for name, outputs in engine.outputs.items():
        assert outputs[-1].error is None or "a passing fault" in outputs[-1].error.message
        if outputs[-1].error is None:
            assert found[name] == expected[name]
    assert sum(outputs[-1].error is None for outputs in engine.outputs.values()) > 4


# ---- what is refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": (20, 24, 3)}, r"data.shape is \[20, 24, 3\], must be \[24, 24, 3\]"),
        ({"length": 15}, "length is 15, must be 16"),
        ({"position": 2}, "has other tokens in its place than 258"),
        ({"data": b"123"}, "data has 3 bytes"),
        ({"data": None}, "a picture's pixels are not on this worker"),
    ],
)
def test_a_picture_that_is_none_of_the_model_s_is_refused(
    model: Path, start: Callable[..., Engine], change: dict[str, Any], message: str
) -> None:
    prompt = Prompt([5, 6, 7], A, [8])
    (feature,), ref = prompt.features, prompt.features[0].data
    assert ref is not None
    tensors = prompt.tensors
    if "data" in change:
        data = change.pop("data")
        tensors = {} if data is None else {ref.content_hash: data}
    if "shape" in change:
        change = {"data": dataclasses.replace(ref, **change)}
    prompt.features = [dataclasses.replace(feature, **change)]
    engine = start(model)
    engine.add("bad", prompt, tensors=tensors)
    engine.add("good", Prompt(A, [5]))
    assert engine.run()["good"] == hf_greedy(model, Prompt(A, [5]), NUM_OUTPUT)
    (output,) = engine.outputs["bad"]
    assert output.error is not None
    assert re.search(message, output.error.message)
    is_missing = "not on this worker" in message
    assert output.error.is_retryable is is_missing
    code = ErrorCode.FAILED_PRECONDITION if is_missing else ErrorCode.INVALID_ARGUMENT
    assert output.error.code is code


def test_a_model_of_text_takes_no_picture(
    make_model: Callable[..., Path], start: Callable[..., Engine]
) -> None:
    engine = start(make_model(vocab_size=300))
    assert engine.loaded.info.modalities == ()
    engine.add("a", Prompt([5], A))
    engine.run()
    assert engine.outputs["a"][0].error is not None
    assert "the model takes text" in engine.outputs["a"][0].error.message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"runner": "pooling"}, "runner is pooling, must be auto or generate for Llava"),
        ({"convert": "embed"}, "convert is embed"),
        ({"model_impl": "transformers"}, "model_impl is transformers, must be auto or native"),
        ({"max_model_len": 16}, "max_model_len is 16, must be above the 16 tokens of a picture"),
    ],
)
def test_what_does_not_go_with_pictures_is_refused_by_its_name(
    model: Path, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(model, **fields)


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("config.json", {"architectures": ["Qwen2VLForConditionalGeneration"]}, "supported is Lla"),
        ("config.json", {"quantization_config": {}}, "quantization_config is set"),
        ("config.json", {"image_token_index": 300}, "image_token_index is 300, must be below"),
        ("config.json", {"text_config": {"model_type": "gemma2"}}, "model_type is gemma2"),
        ("config.json", {"vision_config": {"model_type": "vit"}}, "model_type is vit"),
        ("preprocessor_config.json", {"image_mean": [0.5]}, r"image_mean is \[0.5\], expected"),
        ("preprocessor_config.json", {"image_std": [0, 1, 1]}, "image_std is"),
        ("preprocessor_config.json", {"image_processor": {}}, "no preprocessor_config.json or"),
    ],
)
def test_models_that_are_not_served_are_refused_by_name(
    model: Path, tmp_path: Path, file: str, change: dict[str, Any], message: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    content = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(content | change))
    with pytest.raises(ModelError, match=message):
        read_model_config(folder)


def test_the_config_of_a_published_model_is_read_with_its_defaults(tmp_path: Path) -> None:
    """As llava-hf/llava-1.5-7b-hf has it."""
    text = {"max_position_embeddings": 4096, "model_type": "llama", "vocab_size": 32064}
    vision = {
        "hidden_size": 1024,
        "image_size": 336,
        "intermediate_size": 4096,
        "model_type": "clip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
    }
    files = {
        "config.json": {
            "architectures": [LLAVA],
            "image_token_index": 32000,
            "model_type": "llava",
            "text_config": text | {"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-05},
            "torch_dtype": "float16",
            "vision_config": vision,
            "vision_feature_layer": -2,
            "vision_feature_select_strategy": "default",
        },
        "generation_config.json": {"eos_token_id": 2},
        "processor_config.json": {
            "image_processor": {"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]}
        },
    }
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    config = read_model_config(tmp_path)
    assert (config.hidden_size, config.num_layers, config.num_kv_heads) == (4096, 32, 32)
    assert (config.dtype, config.eos_token_ids) == (torch.bfloat16, (2,))
    assert config.vision == VisionConfig(
        image_token_id=32000,
        num_image_tokens=576,
        image_size=336,
        rescale_factor=1 / 255,
        image_mean=(0.48, 0.46, 0.41),
        image_std=(0.27, 0.26, 0.28),
    )


@pytest.mark.parametrize(
    "rename",
    [
        # As llava-hf's checkpoints, and as modules are called.
        lambda name: name.replace("vision_tower.", "vision_tower.vision_model."),
        lambda name: (
            name.removeprefix("language_model.")
            if "lm_head" in name
            else "model." + name.replace("language_model.model.", "language_model.")
        ),
    ],
)
def test_weights_may_be_named_as_older_and_newer_tools_do(
    model: Path, tmp_path: Path, start: Callable[..., Engine], rename: Callable[[str], str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    renamed = {rename(name): weight for name, weight in weights.items()}
    assert renamed.keys() != weights.keys()
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    engine = start(folder)
    engine.add("a", PROMPTS["one after the other"])
    assert engine.run()["a"] == hf_greedy(model, PROMPTS["one after the other"], NUM_OUTPUT)


def test_a_missing_weight_of_the_tower_is_named(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    del weights["vision_tower.pre_layrnorm.bias"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 weights: .*pre_layrnorm.bias"):
        load_model(folder, read_model_config(folder), device=torch.device("cpu"))
