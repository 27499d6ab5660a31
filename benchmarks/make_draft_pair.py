"""Makes a model and a draft model for it that chooses as it does in so many places.

    python benchmarks/make_draft_pair.py .bench/draft-pair

Nobody has trained either, so one is built from the other: the draft model's weights are the first
rows and columns of the model's first layers, in a residual stream of which the draft model has the
first HIDDEN_SIZE places. All other weights of the model are random. They add to that what the draft
model does not know, and their scale says how much. The model has the shape of Qwen3-0.6B, and costs
what that costs.

Logits have a standard deviation of 4, with which a token has some 4 nats.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from make_model import make_model

DEFAULT_PAIR = Path(".bench/draft-pair")
HIDDEN_SIZE, INTERMEDIATE_SIZE, NUM_LAYERS = 256, 768, 4
NUM_HEADS, NUM_KV_HEADS = 4, 2
LOGITS_STD = 4.0
OUTPUTS = ("o_proj.weight", "down_proj.weight")
# With it some two of three tokens that the model draws at temperature 1 are those that the draft
# model draws with the same noise.
UNKNOWN = 0.025


def make_draft_pair(folder: Path, unknown: float = UNKNOWN) -> tuple[Path, Path]:
    """Write both to `folder`, unless they are there; return the folders of the model and of the
    draft model.
    """
    if not folder.exists():
        new = folder.with_name(f"{folder.name}.new")
        shutil.rmtree(new, ignore_errors=True)
        _make(new / "model", new / "draft", unknown)
        new.rename(folder)
    return folder / "model", folder / "draft"


def _make(target: Path, draft: Path, unknown: float) -> None:
    make_model(target)
    import safetensors.torch

    config = json.loads((target / "config.json").read_text())
    path = target / "model.safetensors"
    large = {name: weight.float() for name, weight in safetensors.torch.load_file(path).items()}
    small = _embed(large, config["hidden_size"], unknown)
    draft.mkdir()
    for weights, place in ((large, target), (small, draft)):
        halves = {name: weight.bfloat16().contiguous() for name, weight in weights.items()}
        safetensors.torch.save_file(halves, place / "model.safetensors", metadata={"format": "pt"})
    config |= {
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": INTERMEDIATE_SIZE,
        "num_hidden_layers": NUM_LAYERS,
        "max_window_layers": NUM_LAYERS,
        "layer_types": config["layer_types"][:NUM_LAYERS],
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
    }
    (draft / "config.json").write_text(json.dumps(config, indent=2))
    for name in ("tokenizer_config.json", "tokenizer.json"):
        shutil.copy(target / name, draft / name)


def _embed(large: dict[str, Any], hidden_size: int, unknown: float) -> dict[str, Any]:
    """Make the draft model's weights out of the first of each of the model's, and scale the others
    by `unknown`, in place.
    """
    import torch

    generator = torch.Generator().manual_seed(1)
    small = {}
    for name, weight in large.items():
        is_shared = ".layers." not in name or int(name.split(".")[2]) < NUM_LAYERS
        part = _part(name, weight)
        if is_shared:
            small[name] = weight[part].clone()
        if name.endswith(("layernorm.weight", "model.norm.weight")):
            # The mean square is over more places, of which most are next to nothing.
            weight *= (HIDDEN_SIZE / hidden_size) ** 0.5
        elif weight.dim() == 2 and (is_shared or name.endswith(OUTPUTS)):
            weight *= unknown
        if is_shared and weight.dim() == 2:
            weight[part] = small[name]
    # Signs keep a token from being its own likeliest successor, as embeddings are tied.
    signs = torch.randint(0, 2, (hidden_size,), generator=generator) * 2.0 - 1.0
    std = float(small["model.embed_tokens.weight"].std()) * HIDDEN_SIZE**0.5
    large["model.norm.weight"] *= signs * LOGITS_STD / std
    small["model.norm.weight"] *= signs[:HIDDEN_SIZE] * LOGITS_STD / std
    return small


def _part(name: str, weight: Any) -> tuple[slice, ...]:
    """Return which rows and columns are the draft model's."""
    head_dim = 128
    queries, keys = slice(NUM_HEADS * head_dim), slice(NUM_KV_HEADS * head_dim)
    stream, inner = slice(HIDDEN_SIZE), slice(INTERMEDIATE_SIZE)
    kind = name.split(".")[-2]
    if kind in ("q_norm", "k_norm"):
        return (slice(None),)
    if weight.dim() == 1:
        return (stream,)
    return {
        "embed_tokens": (slice(None), stream),
        "lm_head": (slice(None), stream),
        "q_proj": (queries, stream),
        "k_proj": (keys, stream),
        "v_proj": (keys, stream),
        "o_proj": (stream, queries),
        "gate_proj": (inner, stream),
        "up_proj": (inner, stream),
        "down_proj": (stream, inner),
    }[kind]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where to write it")
    parser.add_argument("--unknown", type=float, default=UNKNOWN, help="(%(default)s)")
    args = parser.parse_args()
    make_draft_pair(args.folder, args.unknown)
