"""What goes with what: the features that no engine has together, each pair with its reason.

A start is refused for the first pair that it asks for: of its settings when the config is made, of
the model's own features when its files are read. `docs/combinations.md` is made of this table, and
`tests/engine/test_combinations.py` starts an engine with every other pair.
"""

import enum
from collections.abc import Mapping
from typing import NamedTuple


class Feature(enum.Enum):
    """What an engine may have. The values are what users call it."""

    CPU = "`--device cpu`"
    CUDA = "`--device cuda`"
    TENSOR_PARALLEL = "`--tensor-parallel-size` above 1"
    PIPELINE_PARALLEL = "`--pipeline-parallel-size` above 1"
    INTEGER_WEIGHTS = "weights in int8 or int4"
    FP8_WEIGHTS = "weights in FP8"
    FP8_KV = "`--kv-cache-dtype fp8`"
    DETERMINISTIC = "`--deterministic`"
    FLASH_ATTN = "`--attention-backend flash_attn`"
    LORA = "LoRA adapters"
    SUFFIX_DRAFTS = "`--speculation suffix`"
    DRAFT_MODEL = "`--speculation draft_model`"
    ASYNC_SCHEDULING = "`--async-scheduling`"
    NO_PREFIX_CACHING = "`--no-enable-prefix-caching`"
    PREFIX_PULLS = "`--prefix-pulls`"
    KV_OFFLOAD = "KV in tiers (`--kv-offload-host-bytes`, `--kv-offload-disk-path`)"
    POISONED_BLOCKS = "`--poison-freed-blocks`"
    # Features of the model.
    TRANSFORMERS = "models on the transformers backend"
    EXPERTS = "models with experts on our own code"
    SLIDING_WINDOWS = "models with sliding windows"
    MIXED_WINDOWS = "models with sliding windows beside full attention"
    PICTURES = "models that take pictures"
    POOLING = "models that pool"
    MEAN_POOLING = "models that pool by the mean"


OF_MODELS = (
    Feature.TRANSFORMERS,
    Feature.EXPERTS,
    Feature.SLIDING_WINDOWS,
    Feature.MIXED_WINDOWS,
    Feature.PICTURES,
    Feature.POOLING,
    Feature.MEAN_POOLING,
)


class Excluded(NamedTuple):
    """Two features that do not go together, and why."""

    first: Feature
    second: Feature
    reason: str


_RANKS = (Feature.TENSOR_PARALLEL, Feature.PIPELINE_PARALLEL)
_DRAFTS = (Feature.SUFFIX_DRAFTS, Feature.DRAFT_MODEL)


def _excluded(
    first: tuple[Feature, ...], second: tuple[Feature, ...], reason: str
) -> tuple[Excluded, ...]:
    return tuple(Excluded(a, b, reason) for a in first for b in second)


EXCLUDED: tuple[Excluded, ...] = (
    *_excluded((Feature.PIPELINE_PARALLEL,), (Feature.CUDA,), "stages are CPU processes"),
    *_excluded((Feature.FP8_KV,), (Feature.CPU,), "KV in 8 bits is CUDA's"),
    *_excluded((Feature.FLASH_ATTN,), (Feature.CPU,), "FlashAttention 3 is CUDA's"),
    *_excluded((Feature.FLASH_ATTN,), (Feature.DETERMINISTIC,), "its bits depend on the batch"),
    *_excluded((Feature.FLASH_ATTN,), (Feature.FP8_KV,), "it reads KV in the model's dtype"),
    *_excluded(
        (Feature.FLASH_ATTN,),
        (Feature.POISONED_BLOCKS,),
        "it reads stale blocks, and NaN times a weight of 0 is NaN",
    ),
    *_excluded(_DRAFTS, _RANKS, "drafts are checked by one rank"),
    *_excluded((Feature.DRAFT_MODEL,), (Feature.CUDA,), "a draft model runs on the CPU"),
    *_excluded(
        (Feature.DRAFT_MODEL,),
        (Feature.ASYNC_SCHEDULING,),
        "a step that is planned before the last one is over has no drafts of it",
    ),
    *_excluded(
        (Feature.DRAFT_MODEL,),
        (Feature.SLIDING_WINDOWS,),
        "its KV lies under the blocks of one KV group",
    ),
    *_excluded(
        (Feature.KV_OFFLOAD,),
        (Feature.NO_PREFIX_CACHING,),
        "blocks are found again as cached prefixes",
    ),
    *_excluded((Feature.KV_OFFLOAD,), _RANKS, "one rank keeps the copies"),
    *_excluded(
        (Feature.KV_OFFLOAD,),
        (Feature.DRAFT_MODEL,),
        "a block that comes back has no KV of the draft model",
    ),
    *_excluded(
        (Feature.KV_OFFLOAD,),
        (Feature.SLIDING_WINDOWS,),
        "copies are of blocks that all layers have",
    ),
    *_excluded(
        (Feature.TRANSFORMERS,),
        (*_RANKS, Feature.INTEGER_WEIGHTS, Feature.FP8_WEIGHTS, Feature.FP8_KV, Feature.POOLING),
        "only our own code has that",
    ),
    *_excluded(
        (Feature.TRANSFORMERS,),
        (Feature.DETERMINISTIC,),
        "the bits of its modules depend on the batch",
    ),
    *_excluded((Feature.EXPERTS,), (Feature.TENSOR_PARALLEL,), "experts are not cut over ranks"),
    *_excluded(
        (Feature.MIXED_WINDOWS,),
        (Feature.PIPELINE_PARALLEL,),
        "its KV groups do not lie in stages",
    ),
    *_excluded((Feature.PICTURES,), _RANKS, "the vision tower is not cut over ranks"),
    *_excluded((Feature.PICTURES,), (Feature.LORA,), "adapters of such models are not read"),
    *_excluded((Feature.PICTURES,), (Feature.DRAFT_MODEL,), "a draft model sees no pictures"),
    *_excluded((Feature.POOLING,), _DRAFTS, "there are no tokens to draft"),
    *_excluded(
        (Feature.POOLING,),
        (Feature.PREFIX_PULLS, Feature.KV_OFFLOAD),
        "nothing of a prompt comes from elsewhere",
    ),
    *_excluded((Feature.POOLING,), _RANKS, "states are pooled on one rank"),
    *_excluded(
        (Feature.MEAN_POOLING,),
        (Feature.DETERMINISTIC,),
        "how a GPU sums depends on how prompts are cut into chunks",
    ),
)


class _Setting(NamedTuple):
    """A feature that a setting asks for with some of its values."""

    feature: Feature
    field: str
    # Empty: with any but `unset`.
    values: tuple[object, ...] = ()
    unset: object = None


_SETTINGS: tuple[_Setting, ...] = (
    _Setting(Feature.CPU, "device", ("cpu",)),
    _Setting(Feature.CUDA, "device", ("cuda",)),
    _Setting(Feature.TENSOR_PARALLEL, "tensor_parallel_size", unset=1),
    _Setting(Feature.PIPELINE_PARALLEL, "pipeline_parallel_size", unset=1),
    _Setting(Feature.INTEGER_WEIGHTS, "quantization", ("int8", "int4")),
    _Setting(Feature.FP8_WEIGHTS, "quantization", ("fp8",)),
    _Setting(Feature.FP8_KV, "kv_cache_dtype", ("fp8",)),
    _Setting(Feature.DETERMINISTIC, "deterministic", (True,)),
    _Setting(Feature.FLASH_ATTN, "attention_backend", ("flash_attn",)),
    _Setting(Feature.LORA, "lora", unset=()),
    _Setting(Feature.LORA, "lora_root"),
    _Setting(Feature.LORA, "lora_hub", (True,)),
    _Setting(Feature.SUFFIX_DRAFTS, "speculation", ("suffix",)),
    _Setting(Feature.DRAFT_MODEL, "speculation", ("draft_model",)),
    _Setting(Feature.ASYNC_SCHEDULING, "async_scheduling", (True,)),
    _Setting(Feature.NO_PREFIX_CACHING, "enable_prefix_caching", (False,)),
    _Setting(Feature.PREFIX_PULLS, "prefix_pulls", (True,)),
    _Setting(Feature.KV_OFFLOAD, "kv_offload_host_bytes", unset=0),
    _Setting(Feature.KV_OFFLOAD, "kv_offload_disk_path"),
    _Setting(Feature.POISONED_BLOCKS, "poison_freed_blocks", (True,)),
)


def features_of(config: object) -> dict[Feature, str]:
    """Return what an EngineConfig asks for, and how it says it."""
    found: dict[Feature, str] = {}
    for feature, field, values, unset in _SETTINGS:
        value = getattr(config, field)
        if value in values if values else value != unset:
            found.setdefault(feature, f"{field} is {_shown(value)}")
    return found


def check_combination(found: Mapping[Feature, str], error: type[ValueError] = ValueError) -> None:
    """Raise the error, which says what is asked for, for two features that do not go together."""
    for first, second, reason in EXCLUDED:
        if first in found and second in found:
            raise error(f"{found[first]} and {found[second]}: {reason}")


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
