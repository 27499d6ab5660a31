"""Tries every decoder architecture of the installed transformers with tiny random weights, and
writes docs/architectures.md: which run on our own code, which on transformers', and why not.

    .venv/bin/python tools/update_architectures.py          # some minutes
    .venv/bin/python tools/update_architectures.py Name...  # prints what becomes of these
"""

import logging
import multiprocessing
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from pdserve_engine.models.config import FAMILIES, ModelError
from pdserve_engine.models.registry import load_model, read_model_config
from pdserve_engine.models.transformers_backend.config import refuse_unsupported
from pdserve_engine.models.transformers_backend.model import CHECKED_ARCHITECTURES

DOC = Path(__file__).parents[1] / "docs" / "architectures.md"
# Names that config classes have for the same; each gets those that it knows.
SMALL: dict[str, Any] = {
    **dict.fromkeys(("vocab_size",), 199),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head"), 4),
    "num_key_value_heads": 2,
    "head_dim": 16,
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 256),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk"), 2),
    **dict.fromkeys(("pad_token_id", "bos_token_id"), 0),
    "eos_token_id": 1,
    "rotary_dim": 8,
}
# Of the sizes above, tried one after the other: configs that count KV heads by themselves would
# keep a number that their modules do not have.
LEFT_OUT = ((), ("num_key_value_heads",))
_BACKEND_ALONE = "(not run natively: model_impl is transformers)"
MAX_PARAMETERS = 30_000_000
TIMEOUT_S = 120.0
MAX_REASON_CHARS = 160

_HEAD = """\
# Architectures

What becomes of each decoder architecture (`architectures` in `config.json`) of transformers
{version}. `tools/update_architectures.py` writes this page: it makes a model with tiny random
weights of each and loads it.

- **native**: on our own code, tokens compared with transformers' in the tests.
- **transformers, tested**: on transformers' modules with our attention, tokens compared with
  transformers' own.
- **transformers, probed**: the same, not compared; it loads, and a forward pass shows that each
  layer attends as its config says.
- **refused**: with this reason. A config may have another one, such as a window that changes.
- **not tried**: the script makes no small model of it; a checkpoint is probed when it is loaded.

| architecture | | reason |
|---|---|---|
"""


def outcome_of(name: str) -> tuple[str, str]:
    """Return what becomes of an architecture, and why."""
    if name in FAMILIES:
        return "native", ""
    outcomes = [_tried(name, left_out) for left_out in LEFT_OUT]
    return next((each for each in outcomes if each[0] != "refused"), outcomes[0])


def _tried(name: str, left_out: Sequence[str]) -> tuple[str, str]:
    config_class = _config_classes()[name]
    try:
        refuse_unsupported(config_class(), getattr(transformers, name))
        model = _small_model(config_class, name, left_out)
    except ModelError as error:
        return "refused", _short(str(error))
    except Exception as error:  # whatever a config class or a module raises for sizes of ours
        return "not tried", _short(f"{type(error).__name__}: {error}")
    with tempfile.TemporaryDirectory() as folder:
        try:
            model.save_pretrained(folder)
            config = read_model_config(folder, model_impl="transformers", dtype="float32")
            load_model(folder, config, device=torch.device("cpu"), progress=lambda *_: None)
        except ModelError as error:
            return "refused", _short(str(error).removesuffix(_BACKEND_ALONE))
        except Exception as error:
            return "refused", _short(f"DEFECT, no reason of ours: {type(error).__name__}: {error}")
    return f"transformers, {'tested' if name in CHECKED_ARCHITECTURES else 'probed'}", ""


def _config_classes() -> dict[str, type[PreTrainedConfig]]:
    return {
        model_class.__name__: config_class
        for config_class, model_class in MODEL_FOR_CAUSAL_LM_MAPPING.items()
        if not isinstance(model_class, tuple)
    }


def _small_model(config_class: type[PreTrainedConfig], name: str, left_out: Sequence[str]) -> Any:
    known = config_class()
    fields = {
        field: value
        for field, value in SMALL.items()
        if field not in left_out and _takes(known, field)
    }
    if _takes(known, "layer_types") and known.layer_types:
        fields["layer_types"] = known.layer_types[: SMALL["num_hidden_layers"]]
    config = config_class(**fields)
    model_class = getattr(transformers, name)
    with torch.device("meta"):
        num_parameters = sum(each.numel() for each in model_class(config).parameters())
    if num_parameters > MAX_PARAMETERS:
        raise ValueError(f"{num_parameters:,} parameters with small sizes")
    torch.manual_seed(0)
    return model_class(config)


def _takes(config: PreTrainedConfig, field: str) -> bool:
    derived = getattr(type(config), field, None)
    is_derived = isinstance(derived, property) and derived.fset is None
    return hasattr(config, field) and not is_derived


def _short(text: str) -> str:
    line = (
        re.sub(r"\s+", " ", re.sub(r"/tmp/\S+?(?=/config)", "...", text)).strip().replace("|", "/")
    )
    return line if len(line) <= MAX_REASON_CHARS else f"{line[:MAX_REASON_CHARS]}..."


def _quiet() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()


def outcomes(names: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yield names, outcomes and reasons; each in a process of its own, as some end it."""
    context = multiprocessing.get_context("fork")
    with context.Pool(2, initializer=_quiet, maxtasksperchild=1) as pool:
        pending = [(name, pool.apply_async(outcome_of, (name,))) for name in names]
        for name, result in pending:
            try:
                yield (name, *result.get(TIMEOUT_S))
            except multiprocessing.TimeoutError:
                yield name, "not tried", f"not within {TIMEOUT_S:g} s"


def main() -> None:
    names = sys.argv[1:]
    if names:
        for row in outcomes(names):
            print(*row, sep=" | ")
        return
    rows = []
    for name, outcome, reason in outcomes(sorted(_config_classes())):
        print(name, outcome, reason, sep=" | ", flush=True)
        rows.append(f"| `{name}` | {outcome} | {reason} |\n")
    DOC.write_text(_HEAD.format(version=transformers.__version__) + "".join(rows))


if __name__ == "__main__":
    main()
