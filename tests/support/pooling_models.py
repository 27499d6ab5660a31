"""Models that pool, and what transformers makes of their states."""

import functools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


def add_modules(
    model_dir: Path, folder: Path, *, mode: str | None = "lasttoken", normalizes: bool = True
) -> Path:
    """Copy a model to `folder`, with the files of Sentence-Transformers beside it."""
    shutil.copytree(model_dir, folder, dirs_exist_ok=True)
    kinds = ["Transformer", "Pooling"] + ["Normalize"] * normalizes
    paths = ["", "1_Pooling", "2_Normalize"]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(zip(kinds, paths, strict=False))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    modes = {f"pooling_mode_{name}": name == mode for name in ("cls_token", "max_tokens")}
    modes |= {f"pooling_mode_{name}": name == mode for name in ("lasttoken", "mean_tokens")}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(modes))
    return folder


def change_config(model_dir: Path, folder: Path, **fields: Any) -> Path:
    """Copy a model to `folder`, with other fields in its config.json."""
    shutil.copytree(model_dir, folder, dirs_exist_ok=True)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


@functools.cache
def _load(auto_class: str, model_dir: Path) -> Any:
    import transformers

    return getattr(transformers, auto_class).from_pretrained(model_dir, dtype=torch.float32).eval()


@torch.inference_mode()
def hf_states(model_dir: Path, prompt: Sequence[int]) -> torch.Tensor:
    """Return the prompt's last hidden states [num_tokens, hidden_size] in fp32."""
    model = _load("AutoModel", model_dir)
    states: torch.Tensor = model(torch.tensor([prompt])).last_hidden_state[0]
    return states


@torch.inference_mode()
def hf_labels(model_dir: Path, prompt: Sequence[int]) -> torch.Tensor:
    """Return a classifier's logits [num_labels] in fp32."""
    model = _load("AutoModelForSequenceClassification", model_dir)
    logits: torch.Tensor = model(torch.tensor([prompt])).logits[0]
    return logits
