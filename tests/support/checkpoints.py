"""Checkpoints that differ from one that is there: in their tensors, or in their config."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from support.model_driver import Driver, make_prompt, record_logits


def write(
    source: Path, folder: Path, tensors: dict[str, torch.Tensor], quantization: object
) -> None:
    """Write a checkpoint with the tensors, and all else of the source, to a new folder."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    change_config(folder, quantization_config=quantization)


def change_config(folder: Path, **changes: object) -> None:
    """Change fields of `config.json`."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Have a function change the tensors by their names."""
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def logits_of(folder: Path, chunk: int = 10_000, **config: Any) -> torch.Tensor:
    """Return the logits [3, vocab_size] behind a prompt and two tokens."""
    driver = Driver(folder, **config)
    seen = record_logits(driver)
    driver.add("it", make_prompt(40))
    driver.run("it", num_tokens=3, chunk=chunk)
    driver.cache.close()
    return torch.cat(seen[-3:])
