"""Whether a model pools, and how: by its architecture, the files of Sentence-Transformers beside
its weights, and what the operator says, as vLLM's `--runner`, `--convert` and `--pooler-config`.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from pdserve_common.types.pooling_params import CLASSIFY, EMBED, SCORE
from pdserve_engine.config import Convert, Runner
from pdserve_engine.models.config import (
    BASE_MODEL,
    SEQUENCE_CLASSIFICATION,
    Activation,
    ModelError,
    PoolerConfig,
    PoolingType,
    errors_of_fields,
    read_json,
)
from pdserve_engine.models.config_fields import PoolerFields, parse_json, read_fields

MODULES_FILE = "modules.json"
# What a flag in a Pooling module's config.json stands for.
_POOLING_MODES: Mapping[str, PoolingType] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
}
_MODE_PREFIX = "pooling_mode_"
_POOLING_TYPES: Mapping[str, PoolingType] = {"LAST": "last", "MEAN": "mean"}
# The classes that a cross-encoder of Sentence-Transformers names for its answer.
_ACTIVATIONS: Mapping[str, Activation] = {"Identity": "identity", "Sigmoid": "sigmoid"}
_PROBLEM_TYPES: Mapping[str, Activation] = {
    "regression": "identity",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}
_OVERRIDES = (
    "pooling_type",
    "use_activation",
    "is_matryoshka",
    "matryoshka_dimensions",
    "classifier_from_token",
)


def read_pooler_config(
    folder: Path,
    raw: Mapping[str, Any],
    *,
    runner: Runner,
    convert: Convert,
    overrides: str | None,
) -> PoolerConfig | None:
    """Return how the model pools; None if it generates. Raises ModelError for what is not served,
    or would be computed wrongly.

    raw is what `config.json` holds, `overrides` JSON with keys of `PoolerConfig`.
    """
    modules = None if runner == "generate" else _read_modules(folder)
    with errors_of_fields():
        fields = read_fields(PoolerFields, raw)
    architectures = fields.get("architectures") or []
    # GPT2LMHeadModel has one.
    has_head = not any(
        name.endswith((SEQUENCE_CLASSIFICATION, BASE_MODEL)) and "LMHead" not in name
        for name in architectures
    )
    if runner == "auto":
        runner = "generate" if has_head and modules is None else "pooling"
    _refuse_bidirectional(raw)
    if runner == "generate":
        if not has_head:
            raise ModelError(
                f"runner is generate, architectures is {architectures!s:.200}, which has no "
                "lm_head: must be pooling"
            )
        if convert not in ("auto", "none"):
            raise ModelError(f"convert is {convert}, must be auto or none if runner is generate")
        if overrides is not None:
            raise ModelError("pooler_config is set, must be unset if runner is generate")
        return None
    if convert == "none":
        raise ModelError("convert is none, must be auto, embed or classify if runner is pooling")
    changes = _read_overrides(overrides, raw)
    if convert == "auto":
        is_classifier = any(name.endswith(SEQUENCE_CLASSIFICATION) for name in architectures)
        convert = "classify" if is_classifier or changes.classifier_from_token else "embed"
    if convert == "classify":
        return _classifier(folder, fields, changes)
    if changes.classifier_from_token:
        raise ModelError("classifier_from_token is set, must be unset if convert is embed")
    return _embedder(raw, modules or _NO_MODULES, changes)


class _Modules(NamedTuple):
    """What the modules of a Sentence-Transformers model make of a transformer's states."""

    pooling_type: PoolingType
    normalizes: bool


# As vLLM serves decoders that have no such files.
_NO_MODULES = _Modules("last", normalizes=True)


class _Overrides(NamedTuple):
    pooling_type: PoolingType | None = None
    use_activation: bool | None = None
    is_matryoshka: bool = False
    matryoshka_dimensions: tuple[int, ...] = ()
    classifier_from_token: tuple[str, ...] = ()


def _embedder(raw: Mapping[str, Any], modules: _Modules, changes: _Overrides) -> PoolerConfig:
    use_activation = modules.normalizes
    if changes.use_activation is not None:
        use_activation = changes.use_activation
    return PoolerConfig(
        tasks=(EMBED,),
        pooling_type=changes.pooling_type or modules.pooling_type,
        activation="normalize",
        use_activation=use_activation,
        is_matryoshka=changes.is_matryoshka,
        matryoshka_dimensions=changes.matryoshka_dimensions,
    )


def _classifier(folder: Path, fields: PoolerFields, changes: _Overrides) -> PoolerConfig:
    if changes.classifier_from_token:
        return PoolerConfig(
            tasks=(CLASSIFY, SCORE),
            pooling_type=changes.pooling_type or "last",
            num_labels=1,
            classifier_token_ids=_token_ids(folder, changes.classifier_from_token),
            activation="sigmoid",
            use_activation=changes.use_activation is not False,
        )
    num_labels = _num_labels(fields)
    return PoolerConfig(
        tasks=(CLASSIFY, SCORE) if num_labels == 1 else (CLASSIFY,),
        pooling_type=changes.pooling_type or "last",
        num_labels=num_labels,
        activation=_activation(fields, num_labels),
        use_activation=changes.use_activation is not False,
    )


def _token_ids(folder: Path, texts: Sequence[str]) -> tuple[int, ...]:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            f"classifier_from_token is {list(texts)!s:.200}, {folder} has no tokenizer.json"
        )
    try:
        vocabulary = tokenizers.Tokenizer.from_file(str(path)).get_vocab()
    # It has no exception of its own.
    except Exception as error:
        raise ModelError(f"{path} is damaged or no tokenizer: {error!s:.200}") from error
    if unknown := [text for text in texts if text not in vocabulary]:
        raise ModelError(
            f"classifier_from_token has {unknown[0]!r:.200}, which is no token of the model"
        )
    return tuple(vocabulary[text] for text in texts)


def _num_labels(fields: PoolerFields) -> int:
    if (labels := fields.get("id2label")) is None:
        # transformers' configs have two labels and leave them out.
        return fields.get("num_labels") or 2
    if not labels:
        raise ModelError("id2label has no labels, must have at least 1")
    return len(labels)


def _activation(fields: PoolerFields, num_labels: int) -> Activation:
    """Return what makes probabilities of logits; the order is vLLM's."""
    if (problem := fields.get("problem_type")) is not None:
        if problem not in _PROBLEM_TYPES:
            known = ", ".join(_PROBLEM_TYPES)
            raise ModelError(f"problem_type is {problem:.200}, supported are {known}")
        activation = _PROBLEM_TYPES[problem]
    else:
        module = fields.get("sbert_ce_default_activation_function")
        module = (fields.get("sentence_transformers") or {}).get("activation_fn", module)
        if module is not None:
            name = str(module).rpartition(".")[2]
            if name not in _ACTIVATIONS:
                known = ", ".join(_ACTIVATIONS)
                raise ModelError(f"activation_fn is {module!s:.200}, supported are {known}")
            return _ACTIVATIONS[name]
        activation = "softmax"
    # Softmax of one number is 1.
    return "sigmoid" if activation == "softmax" and num_labels == 1 else activation


def _refuse_bidirectional(raw: Mapping[str, Any]) -> None:
    """What a token sees of the tokens behind it is not in its KV."""
    for field, causal in (("is_causal", True), ("use_bidirectional_attention", False)):
        value = raw.get(field)
        if value is not None and value is not causal:
            raise ModelError(
                f"{field} is {json.dumps(value):.200}: tokens attend to those behind them, "
                "supported is causal attention"
            )


def _read_modules(folder: Path) -> _Modules | None:
    """Return what Sentence-Transformers' files say; None if there are none."""
    path = folder / MODULES_FILE
    if not path.is_file():
        return None
    try:
        entries = parse_json(path.read_text(encoding="utf-8"))
        modules = [(str(entry["type"]).rpartition(".")[2], str(entry["path"])) for entry in entries]
    except (ValueError, TypeError, KeyError) as error:
        raise ModelError(f"{path} is no list of modules: {error!r:.200}") from error
    kinds = [kind for kind, _ in modules]
    if kinds[:2] != ["Transformer", "Pooling"] or kinds[2:] not in ([], ["Normalize"]):
        raise ModelError(
            f"{path} has {', '.join(kinds):.200}, supported are Transformer, Pooling and, at the "
            "end, Normalize"
        )
    pooling = folder / modules[1][1] / "config.json"
    return _Modules(_read_pooling_type(pooling), normalizes=len(kinds) == 3)


def _read_pooling_type(path: Path) -> PoolingType:
    raw = read_json(path)
    modes: Sequence[str] = [
        name for name, value in raw.items() if name.startswith(_MODE_PREFIX) and value is True
    ]
    if (mode := raw.get("pooling_mode")) is not None:
        mode = str(mode)
        modes = [name for name in _POOLING_MODES if mode in name.removeprefix(_MODE_PREFIX)]
        modes = modes or [mode]
    if len(modes) != 1 or modes[0] not in _POOLING_MODES:
        raise ModelError(
            f"{path} has {', '.join(modes) or 'no pooling mode':.200}, supported is one of "
            f"{', '.join(_POOLING_MODES)}"
        )
    pooling_type = _POOLING_MODES[modes[0]]
    if pooling_type == "mean" and raw.get("include_prompt") is False:
        raise ModelError(
            f"{path} has include_prompt false with the mean of tokens, must be true: a request "
            "does not say where its instruction ends"
        )
    return pooling_type


def _read_overrides(text: str | None, raw: Mapping[str, Any]) -> _Overrides:
    """Return what the operator says, or else what `config.json` says of Matryoshka embeddings."""
    fields = ("is_matryoshka", "matryoshka_dimensions")
    values = {name: raw[name] for name in fields if raw.get(name) is not None}
    overrides = {} if text is None else _parse_overrides(text)
    if overrides.get("is_matryoshka") is False:
        values.clear()  # config.json's dimensions would say that it is one
    values |= overrides
    pooling_type = values.get("pooling_type")
    if pooling_type is not None and str(pooling_type).upper() not in _POOLING_TYPES:
        known = ", ".join(_POOLING_TYPES)
        raise ModelError(f"pooling_type is {pooling_type!s:.200}, supported are {known}")
    for name in ("use_activation", "is_matryoshka"):
        if values.get(name) is not None and not isinstance(values[name], bool):
            raise ModelError(f"{name} is {values[name]!s:.200}, must be true or false")
    dimensions = _check_dimensions(values.get("matryoshka_dimensions"), raw.get("hidden_size"))
    return _Overrides(
        None if pooling_type is None else _POOLING_TYPES[str(pooling_type).upper()],
        values.get("use_activation"),
        bool(values.get("is_matryoshka")) or bool(dimensions),
        dimensions,
        _check_tokens(values.get("classifier_from_token")),
    )


def _parse_overrides(text: str) -> dict[str, Any]:
    try:
        values = parse_json(text)
    except ValueError as error:
        raise ModelError(f"pooler_config is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"pooler_config is a JSON {type(values).__name__}, must be an object")
    if unknown := sorted(values.keys() - set(_OVERRIDES)):
        raise ModelError(
            f"pooler_config has {', '.join(unknown):.200}, supported are {', '.join(_OVERRIDES)}"
        )
    return values


def _check_tokens(values: object) -> tuple[str, ...]:
    if values is None:
        return ()
    if not isinstance(values, list) or [type(value) for value in values] != [str, str]:
        raise ModelError(
            f"classifier_from_token is {values!s:.200}, must be a list of two tokens: no and yes"
        )
    return tuple(values)


def _check_dimensions(values: object, hidden_size: object) -> tuple[int, ...]:
    if values is None:
        return ()
    limit = hidden_size if isinstance(hidden_size, int) else 0
    if not isinstance(values, list) or not all(
        type(value) is int and 1 <= value <= limit for value in values
    ):
        raise ModelError(
            f"matryoshka_dimensions is {values!s:.200}, must be a list of numbers from 1 to "
            f"hidden_size ({limit})"
        )
    return tuple(sorted(values))
