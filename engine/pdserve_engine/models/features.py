"""What of `combinations.Feature` a model brings."""

from typing import Any

from pdserve_engine.combinations import Feature
from pdserve_engine.models.config import LlamaConfig, ModelConfig, PoolerConfig
from pdserve_engine.models.quantization import Fp8Quantization, Quantization


def features_of_model(config: ModelConfig) -> dict[Feature, str]:
    """Return them, and how a refusal says each."""
    name, windows = config.architecture, set(config.attention_windows)
    found = features_of_facts(
        quantization=config.quantization, pooler=config.pooler, has_fp8_kv=config.has_fp8_kv
    )
    if not isinstance(config, LlamaConfig):
        found[Feature.TRANSFORMERS] = f"{name} runs on the transformers backend"
    elif config.experts is not None:
        found[Feature.EXPERTS] = f"{name} has experts"
    if windows != {None}:
        found[Feature.SLIDING_WINDOWS] = f"{name} has sliding windows"
    if len(windows) > 1:
        found[Feature.MIXED_WINDOWS] = f"{name} has sliding windows beside full attention"
    if config.vision is not None:
        found[Feature.PICTURES] = f"{name} takes pictures"
    return found


def features_of_facts(
    *,
    quantization: Quantization | None,
    pooler: PoolerConfig | None,
    has_fp8_kv: bool,
    **others: Any,
) -> dict[Feature, str]:
    """Return what the fields of a ModelConfig bring that do not depend on who runs the model."""
    del others
    found = {}
    if quantization is not None:
        is_fp8 = isinstance(quantization, Fp8Quantization)
        feature = Feature.FP8_WEIGHTS if is_fp8 else Feature.INTEGER_WEIGHTS
        found[feature] = f"quantization is {quantization.method}"
    if has_fp8_kv:
        found[Feature.FP8_KV] = "kv_cache_dtype is fp8"
    if pooler is not None:
        tasks = ", ".join(pooler.tasks)
        found[Feature.POOLING] = f"the model pools ({tasks})"
        if pooler.pooling_type == "mean":
            found[Feature.MEAN_POOLING] = f"the model pools the mean of its states ({tasks})"
    return found
