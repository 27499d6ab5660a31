"""A model cut over ranks brings, to the bit, what it does in one piece."""

import dataclasses
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from pdserve_common.types.engine import EngineCoreRequest, Generate
from pdserve_common.types.lora import LoRARequest
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_engine.assemble import LoadedEngine
from pdserve_engine.models.config import ModelError
from support.adapters import write_adapter
from support.answers import Answer, answers
from support.engines import load
from support.models import NATIVE_MODELS
from support.samples import sampled
from support.threaded_ranks import ThreadedRanks

# Tensor parallel size, stages.
SIZES = ((2, 1), (4, 1), (1, 2), (2, 2))
NUM_OUTPUT = 12
PROMPT_LENS = (1, 17, 40, 90)
PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.8, top_p=0.9, top_k=40, seed=2, logprobs=3),
    SamplingParams(
        temperature=0.7, seed=3, repetition_penalty=1.3, logit_bias={3: 2.0}, prompt_logprobs=2
    ),
)
# Of NATIVE_MODELS, with what is set.
CASES: tuple[tuple[str, str | None], ...] = (
    ("llama", None),
    ("llama-biases", None),
    ("llama-tied-sharded", None),
    ("qwen2", None),
    ("qwen3", None),
    ("llama", "int8"),
    ("llama", "fp8"),
    ("qwen3-wide-heads", "int4"),
)
# Each format of weights once; `make soak` has all.
SAMPLE = (
    ("llama-tied-sharded", None),
    ("qwen3", None),
    ("llama", "fp8"),
    ("qwen3-wide-heads", "int4"),
)
CASES_WITH_ADAPTERS: tuple[tuple[str, str | None], ...] = (
    ("llama-biases", None),
    ("qwen3", None),
    ("qwen3-wide-heads", "int4"),
)
# Integers are cut between groups of 32 inputs.
FOR_INT4 = {"intermediate_size": 128}


def config_of(folder: Path, **fields: Any) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "dtype": "bfloat16",
        "num_blocks": 64,
        "max_model_len": 128,
        "max_num_batched_tokens": 48,
        "poison_freed_blocks": True,
    }
    return {"model": folder, **defaults, **fields}


def requests(vocab_size: int, digests: Sequence[str] = ()) -> list[EngineCoreRequest]:
    """Some with none of the adapters."""
    rng, adapters = random.Random(0), random.Random(1)
    loras = [None, *(LoRARequest(lora_name="", digest=digest) for digest in digests)]
    return [
        EngineCoreRequest(
            request_id=f"{length}-{number}",
            prompt_token_ids=tuple(rng.randrange(2, vocab_size) for _ in range(length)),
            task=Generate(dataclasses.replace(params, max_tokens=NUM_OUTPUT, ignore_eos=True)),
            lora_request=adapters.choice(loras),
            client_index=0,
        )
        for length in PROMPT_LENS
        for number, params in enumerate(PARAMS)
    ]


def answers_of(engine: LoadedEngine) -> dict[str, Answer]:
    """What the engine says to `requests`, which come one after the other, a step apart."""
    digests = [adapter.digest for adapter in engine.control.adapters.adapters]
    found = answers(engine, requests(engine.info.vocab_size, digests), at_once=1)
    assert engine.close()
    assert not any(answer.error for answer in found.values())
    return found


@pytest.fixture
def load_cut(tmp_path: Path) -> Callable[..., LoadedEngine]:
    """Load a config over ranks that are threads."""

    def load_cut(config: dict[str, Any], size: int, num_stages: int) -> LoadedEngine:
        folder = tmp_path / f"{size}-{num_stages}"
        folder.mkdir()
        return load(
            **config,
            tensor_parallel_size=size,
            pipeline_parallel_size=num_stages,
            make_executor=lambda config, source, name: ThreadedRanks(config, folder),
        )

    return load_cut


@pytest.mark.parametrize(("name", "quantization"), sampled(CASES, *SAMPLE))
def test_bits_do_not_depend_on_the_cut(
    name: str,
    quantization: str | None,
    make_model: Callable[..., Path],
    load_cut: Callable[..., LoadedEngine],
) -> None:
    arch, overrides = NATIVE_MODELS[name]
    more = FOR_INT4 if quantization == "int4" else {}
    config = config_of(make_model(arch, **overrides | more), quantization=quantization)
    whole = load(**config)
    assert whole.info.determinism == "exact"
    expected = answers_of(whole)
    for size, num_stages in SIZES:
        cut = load_cut(config, size, num_stages)
        assert (cut.info.determinism, cut.info.numerics_id) == ("exact", whole.info.numerics_id)
        assert cut.info.kv_compatibility_hash == whole.info.kv_compatibility_hash
        assert answers_of(cut) == expected, (size, num_stages)


def write_adapters(folder: Path, parent: Path) -> tuple[str, ...]:
    """Have one with all linears, one with few, and one that some stages have nothing of."""
    configs: dict[str, dict[str, Any]] = {
        "all": {"r": 16},
        "few": {"r": 5, "target_modules": ["k_proj", "up_proj", "o_proj"]},
        "last": {"r": 8, "layers_to_transform": [2], "rank_pattern": {"down_proj": 3}},
    }
    return tuple(
        f"{name}={write_adapter(folder, parent / name, seed=seed, **config)}"
        for seed, (name, config) in enumerate(configs.items())
    )


@pytest.mark.parametrize(
    ("name", "quantization", "num_stages"),
    sampled(
        [("mixtral", None, 3), ("qwen2-moe", "int8", 2), ("qwen3-moe", None, 2)],
        ("qwen2-moe", "int8", 2),
    ),
)
def test_bits_of_experts_do_not_depend_on_the_stages(
    name: str,
    quantization: str | None,
    num_stages: int,
    make_model: Callable[..., Path],
    load_cut: Callable[..., LoadedEngine],
) -> None:
    arch, overrides = NATIVE_MODELS[name]
    config = config_of(make_model(arch, **overrides), quantization=quantization)
    expected = answers_of(load(**config))
    cut = load_cut(config, 1, num_stages)
    assert cut.info.determinism == "exact"
    assert answers_of(cut) == expected


@pytest.mark.parametrize(
    ("name", "quantization"), sampled(CASES_WITH_ADAPTERS, ("llama-biases", None))
)
def test_bits_with_adapters_do_not_depend_on_the_cut(
    name: str,
    quantization: str | None,
    make_model: Callable[..., Path],
    load_cut: Callable[..., LoadedEngine],
    tmp_path: Path,
) -> None:
    arch, overrides = NATIVE_MODELS[name]
    folder = make_model(arch, **overrides | (FOR_INT4 if quantization == "int4" else {}))
    lora = write_adapters(folder, tmp_path)
    config = config_of(folder, quantization=quantization, lora=lora, max_lora_rank=16)
    expected = answers_of(load(**config))
    without = answers_of(load(**config | {"lora": ()}))
    assert expected != without
    for size, num_stages in SIZES:
        assert answers_of(load_cut(config, size, num_stages)) == expected, (size, num_stages)


@pytest.mark.parametrize(
    ("overrides", "fields", "message"),
    [
        ({}, {"tensor_parallel_size": 3}, "is 3, must be one of 1, 2, 4, 8"),
        ({}, {"tensor_parallel_size": 8}, "num_attention_heads is 4"),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96},
            {"tensor_parallel_size": 2},
            "num_key_value_heads is 3",
        ),
        (
            {"intermediate_size": 100},
            {"tensor_parallel_size": 2},
            "intermediate_size is 100, which has no 8 equal parts of an even number",
        ),
        ({"vocab_size": 33}, {"tensor_parallel_size": 4}, "vocab_size is 33, a rank takes 32"),
        ({}, {"pipeline_parallel_size": 4}, "is 4, the model has 3 layers"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_the_numbers(
    overrides: dict[str, Any],
    fields: dict[str, int],
    message: str,
    make_model: Callable[..., Path],
) -> None:
    folder = make_model("LlamaForCausalLM", **overrides)
    with pytest.raises(ModelError, match=message):
        load(**config_of(folder, **fields))


def test_groups_of_integers_are_not_cut(
    make_model: Callable[..., Path], load_cut: Callable[..., LoadedEngine]
) -> None:
    arch, overrides = NATIVE_MODELS["qwen3"]
    config = config_of(make_model(arch, **overrides), quantization="int4")
    with pytest.raises(ModelError, match=r"inputs .* of 64 are not whole groups of 32"):
        load_cut(config, 4, 1)
