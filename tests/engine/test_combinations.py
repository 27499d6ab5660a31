"""Each pair of features is served, or refused at the start with its reason."""

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import combinations
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from pdserve_common.types.engine import Generate, Pool
from pdserve_common.types.lora import LoRARequest
from pdserve_common.types.pooling_params import PoolingParams
from pdserve_engine.assemble import LoadedEngine
from pdserve_engine.combinations import EXCLUDED, OF_MODELS, Excluded, Feature, features_of
from pdserve_engine.config import EngineConfig
from pdserve_engine.models.features import features_of_model
from pdserve_engine.models.registry import read_model_config
from support.adapters import write_adapter
from support.engines import engine_config, load, run_to_end, tokens_of
from support.models import EXPERTS, LLAVA, WINDOW
from support.pooling_engines import vector_of
from support.requests import greedy, make_request
from update_combinations import DOC, render

PROMPT = tuple(range(3, 51))
NUM_TOKENS = 6


class Kind(NamedTuple):
    """A model, and the features that it brings."""

    features: frozenset[Feature]
    architecture: str
    overrides: Mapping[str, Any] = MappingProxyType({})
    settings: Mapping[str, Any] = MappingProxyType({})


WINDOWS, POOLS = Feature.SLIDING_WINDOWS, Feature.POOLING
LAST_WINDOWS = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
KINDS = {
    "dense": Kind(frozenset(), "LlamaForCausalLM"),
    "experts": Kind(frozenset({Feature.EXPERTS}), "MixtralForCausalLM", {"num_local_experts": 4}),
    "integer experts": Kind(
        frozenset({Feature.EXPERTS, Feature.INTEGER_WEIGHTS}),
        "Qwen2MoeForCausalLM",
        EXPERTS | {"num_experts": 4},
        {"quantization": "int4"},
    ),
    "windows": Kind(frozenset({WINDOWS}), "MistralForCausalLM", {"sliding_window": WINDOW}),
    "mixed windows": Kind(
        frozenset({WINDOWS, Feature.MIXED_WINDOWS}), "Qwen2ForCausalLM", LAST_WINDOWS
    ),
    "pictures": Kind(frozenset({Feature.PICTURES}), LLAVA),
    "transformers": Kind(frozenset({Feature.TRANSFORMERS}), "Olmo2ForCausalLM"),
    "pools the last": Kind(frozenset({POOLS}), "Qwen3Model"),
    "pools the mean": Kind(
        frozenset({POOLS, Feature.MEAN_POOLING}),
        "Qwen3Model",
        settings={"pooler_config": '{"pooling_type": "MEAN"}'},
    ),
}
# How the others are asked for. Of those that name one field an engine has one.
SETTINGS: dict[Feature, dict[str, Any]] = {
    Feature.CPU: {"device": "cpu"},
    Feature.CUDA: {"device": "cuda"},
    Feature.TENSOR_PARALLEL: {"tensor_parallel_size": 2},
    Feature.PIPELINE_PARALLEL: {"pipeline_parallel_size": 2},
    Feature.INTEGER_WEIGHTS: {"quantization": "int8"},
    Feature.FP8_WEIGHTS: {"quantization": "fp8"},
    Feature.FP8_KV: {"kv_cache_dtype": "fp8"},
    Feature.DETERMINISTIC: {"deterministic": True},
    Feature.FLASH_ATTN: {"attention_backend": "flash_attn"},
    Feature.LORA: {"lora": ("a=ADAPTER",)},
    Feature.SUFFIX_DRAFTS: {"speculation": "suffix"},
    Feature.DRAFT_MODEL: {"speculation": "draft_model", "draft_model": "MODEL"},
    Feature.ASYNC_SCHEDULING: {"async_scheduling": True},
    Feature.NO_PREFIX_CACHING: {"enable_prefix_caching": False},
    Feature.PREFIX_PULLS: {"prefix_pulls": True, "kv_connector": "nixl"},
    Feature.KV_OFFLOAD: {"kv_offload_host_bytes": 1 << 24},
    Feature.POISONED_BLOCKS: {"poison_freed_blocks": True},
}
NEED_A_GPU = {Feature.CUDA, Feature.FP8_KV, Feature.FLASH_ATTN}
# These may change tokens; what they are beside others is compared with what they are alone.
CHANGE_TOKENS = {Feature.INTEGER_WEIGHTS, Feature.FP8_WEIGHTS, Feature.LORA}
REASONS = {frozenset(pair[:2]): pair.reason for pair in EXCLUDED}


def go_together(first: Feature, second: Feature) -> bool:
    return frozenset((first, second)) not in REASONS and not (
        SETTINGS.get(first, {}).keys() & SETTINGS.get(second, {}).keys()
    )


def served_together() -> Iterator[tuple[str, tuple[Feature, ...]]]:
    """Yield kinds of models with settings that a CPU can run. Each pair that is served is in one of
    them at least, and each has as many settings as close an open pair.
    """
    settings = [each for each in SETTINGS if each not in NEED_A_GPU]
    pairs = [pair for pair in combinations(settings, 2) if go_together(*pair)]
    allowed = {
        name: [each for each in settings if all(go_together(of, each) for of in kind.features)]
        for name, kind in KINDS.items()
    }
    goals = [(name, (each,)) for name in allowed for each in allowed[name]]
    goals += [("dense", pair) for pair in pairs]
    is_open = {(name, each[0]) for name, each in goals if len(each) == 1} | set(pairs)
    for name, goal in goals:
        if not is_open & {(name, goal[0]) if len(goal) == 1 else goal}:
            continue
        chosen = set(goal)
        for each in allowed[name]:
            new = {(name, each), *(_ordered(other, each) for other in chosen)}
            if all(go_together(other, each) for other in chosen - {each}) and new & is_open:
                chosen.add(each)
        in_order = tuple(each for each in settings if each in chosen)
        is_open -= {*((name, each) for each in chosen), *combinations(in_order, 2)}
        yield name, in_order


def _ordered(first: Feature, second: Feature) -> tuple[Feature, Feature]:
    order = list(SETTINGS)
    return (first, second) if order.index(first) < order.index(second) else (second, first)


SERVED = tuple(served_together())


def build(
    make_served_model: Callable[..., Path], tmp_path: Path, name: str, chosen: tuple[Feature, ...]
) -> tuple[Path, dict[str, Any]]:
    """Return the model's folder, and the settings."""
    kind = KINDS[name]
    folder = make_served_model(kind.architecture, **kind.overrides)
    fields = dict(kind.settings)
    for feature in chosen:
        fields |= SETTINGS[feature]
    if "lora" in fields:
        of_attention = {"target_modules": ["q_proj", "v_proj"]}  # experts have no adapters
        fields["lora"] = (f"a={write_adapter(folder, tmp_path / 'adapter', **of_attention)}",)
    if "draft_model" in fields:
        fields["draft_model"] = str(make_served_model("LlamaForCausalLM"))
    return folder, fields


def answer(engine: LoadedEngine, pools: bool) -> list[Any]:
    """Return what a prompt brings, also of the adapter if there is one, and a second time."""
    (adapter,) = engine.control.adapters.adapters or (None,)
    lora = adapter and LoRARequest(lora_name="a", digest=adapter.digest)
    task = Pool(PoolingParams(task="embed")) if pools else Generate(greedy(NUM_TOKENS))
    found = []
    for number in range(2):
        request = make_request(f"r{number}", PROMPT, lora_request=lora, task=task)
        outputs = run_to_end(engine.core, [request])[request.request_id]
        found.append(vector_of(*outputs) if pools else tokens_of(outputs))
    return found


@pytest.mark.parametrize(("name", "chosen"), SERVED, ids=lambda value: str(value)[:30])
def test_what_goes_together_is_served(
    make_served_model: Callable[..., Path], tmp_path: Path, name: str, chosen: tuple[Feature, ...]
) -> None:
    pools = POOLS in KINDS[name].features
    results = []
    alone = tuple(each for each in chosen if each in CHANGE_TOKENS)
    for index, settings in enumerate((alone, chosen)):
        folder, fields = build(make_served_model, tmp_path / str(index), name, settings)
        fields = {"dtype": "bfloat16", "num_blocks": 64, "max_model_len": 128} | fields
        engine = load(folder, role="prefill" if pools else "decode", **fields)
        try:
            results.append(answer(engine, pools))
        finally:
            assert engine.close()
    assert results[0] == results[1]


@pytest.mark.parametrize("pair", EXCLUDED, ids=lambda pair: f"{pair.first.name}-{pair.second.name}")
def test_what_does_not_is_refused_with_its_reason(
    make_served_model: Callable[..., Path], pair: Excluded
) -> None:
    of_model = {each for each in pair[:2] if each in OF_MODELS}
    settings = [each for each in pair[:2] if each in SETTINGS]
    # A model of the backend that pools is asked for by a setting.
    pools = {} if of_model != {Feature.TRANSFORMERS, POOLS} else {"runner": "pooling"}
    wanted = of_model - {POOLS} if pools else of_model
    kind = next(kind for kind in KINDS.values() if kind.features >= wanted)
    fields = {**kind.settings, **pools}
    for each in settings:
        fields |= SETTINGS[each]
    if NEED_A_GPU & set(settings) and Feature.CPU not in settings:
        fields["device"] = "cuda"
    folder = make_served_model(kind.architecture, **kind.overrides)
    with pytest.raises(ValueError, match=re.escape(pair.reason)):
        load(folder, role="prefill" if POOLS in of_model else "decode", **fields)


def test_each_feature_is_found_where_it_is(make_served_model: Callable[..., Path]) -> None:
    """So that no pair goes unseen."""
    for feature, fields in SETTINGS.items():
        if feature is not Feature.CPU and not (NEED_A_GPU & {feature}):
            assert feature in features_of(EngineConfig(**fields)), feature
    for name, kind in KINDS.items():
        config = engine_config(
            make_served_model(kind.architecture, **kind.overrides), **kind.settings
        )
        found = features_of_model(
            read_model_config(
                config.model,
                pooler_config=config.pooler_config,
                quantization=config.quantization,
            )
        )
        assert found.keys() == kind.features, name
    assert {*SETTINGS, *OF_MODELS} == set(Feature)


def test_the_page_is_the_table() -> None:
    assert DOC.read_text(encoding="utf-8") == render(), "run tools/update_combinations.py"
