"""Digests of what must be equal: before decode may use prefill's KV blocks, and for one model's
tokens.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from pdserve_common.types.kv import KVLayout
from pdserve_engine.grammar.native import xgrammar_version
from pdserve_engine.models.config import ModelConfig
from pdserve_engine.models.weights.loader import weights_digest

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


def compatibility_hash(
    model_dir: str | Path,
    config: ModelConfig,
    layout: KVLayout,
    *,
    logits_processors: Iterable[str] = (),
) -> str:
    """Return a SHA-256 over model shape, quantization, dtype, weights, tokenizer, block layout, the
    names of the logits processors and the version of what enforces grammars: prefill and decode go
    by one reading of them. Hello and welcome compare protocol versions themselves.

    max_model_len is left out: prefill and decode may differ in it, requests are checked against
    each. But it must not be within a sliding window on one of them only: that one has other KV
    groups. How many ranks a worker has is left out as well.
    """
    shape = dataclasses.asdict(config)
    # The second is told by block_bytes; what pools hands nothing over.
    del shape["max_model_len"], shape["has_fp8_kv"], shape["pooler"]
    # As workers say it that do not know of these.
    for field in ("vision", "experts"):
        if shape.get(field) is None:
            shape.pop(field, None)
    if shape.get("experts") and shape["experts"]["shared_size"] is None:
        del shape["experts"]["shared_size"]
    block = dataclasses.asdict(layout)
    # The model's shape implies them, and workers that speak version 3 do not know them.
    del block["num_kv_heads"], block["head_bytes"]
    parts = {
        "model": shape,
        "weights": weights_digest(model_dir),
        "tokenizer": _tokenizer_digest(Path(model_dir)),
        "layout": block,
        "logits_processors": sorted(logits_processors),
        "xgrammar": xgrammar_version(),
    }
    return _sha256(parts)


def model_digest(
    model_dir: str | Path, config: ModelConfig, *, logits_processors: Iterable[str] = ()
) -> str:
    """Return a SHA-256 over what makes another model of two workers: checkpoint and its config,
    dtype, quantization, EOS tokens, the names of the logits processors and what is pooled how.

    What only says how it is computed or how its KV lies is left out: blocks, tiles, kernels, which
    code runs it and how long contexts may be.
    """
    parts: dict[str, object] = {
        "weights": weights_digest(model_dir),
        "dtype": config.dtype_name,
        "quantization": config.quantization and dataclasses.asdict(config.quantization),
        "eos_token_ids": config.eos_token_ids,
        "logits_processors": sorted(logits_processors),
    }
    if config.pooler is not None:  # the same weights may generate elsewhere
        parts["pooler"] = dataclasses.asdict(config.pooler)
    if config.vision is not None:  # some of it stands beside the checkpoint
        parts["vision"] = dataclasses.asdict(config.vision)
    return _sha256(parts)


def _sha256(parts: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _tokenizer_digest(model_dir: Path) -> str:
    digest = hashlib.sha256()
    for name in TOKENIZER_FILES:
        path = model_dir / name
        if path.is_file():
            digest.update(name.encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()
