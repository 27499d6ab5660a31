"""LoRA adapters that peft writes, and the models that they make when merged."""

from pathlib import Path
from typing import Any

import torch

# Large enough that an adapter changes greedy text.
LORA_STD = 0.3
ALL_PROJECTIONS = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
)


def write_adapter(
    model_dir: Path,
    folder: Path,
    *,
    seed: int = 0,
    auto_class: str = "AutoModelForCausalLM",
    **config: Any,
) -> Path:
    """Have peft write an adapter with random weights for a model, as the class loads it; `config`
    as LoraConfig's.
    """
    _load(model_dir, seed, config, auto_class).save_pretrained(folder)
    return folder


@torch.inference_mode()
def merged_states(model_dir: Path, folder: Path, prompt: list[int]) -> torch.Tensor:
    """Return the last hidden states [num_tokens, hidden_size] of a model without a head that has
    the adapter in its weights.
    """
    from peft import PeftModel
    from transformers import AutoModel

    model = AutoModel.from_pretrained(model_dir, dtype=torch.float32)
    merged: Any = PeftModel.from_pretrained(model, folder).merge_and_unload().eval()
    states: torch.Tensor = merged(torch.tensor([prompt])).last_hidden_state[0]
    return states


def merged_model(model_dir: Path, folder: Path) -> Any:
    """Return transformers' model with the adapter in its weights, which never stops early."""
    from peft import PeftModel
    from transformers import AutoConfig, AutoModelForCausalLM

    has_softcap = getattr(AutoConfig.from_pretrained(model_dir), "attn_logit_softcapping", None)
    model = AutoModelForCausalLM.from_pretrained(
        model_dir,
        dtype=torch.float32,
        # Not all versions refuse SDPA, which knows of no softcap.
        attn_implementation="eager" if has_softcap else None,
    )
    merged: Any = PeftModel.from_pretrained(model, folder).merge_and_unload()
    merged.generation_config.eos_token_id = None
    return merged.eval()


def merged_greedy(model_dir: Path, folder: Path, prompt: list[int], num_tokens: int) -> list[int]:
    """Return the tokens that the merged model generates."""
    model = merged_model(model_dir, folder)
    token_ids = torch.tensor([prompt])
    with torch.inference_mode():
        output = model.generate(
            token_ids,
            attention_mask=torch.ones_like(token_ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
    generated: list[int] = output[0, len(prompt) :].tolist()
    return generated


def _load(model_dir: Path, seed: int, config: dict[str, Any], auto_class: str) -> Any:
    import transformers
    from peft import LoraConfig, get_peft_model

    model = getattr(transformers, auto_class).from_pretrained(model_dir, dtype=torch.float32)
    fields: dict[str, Any] = {"target_modules": list(ALL_PROJECTIONS), "r": 8, "lora_alpha": 16}
    task_type = "FEATURE_EXTRACTION" if auto_class == "AutoModel" else "CAUSAL_LM"
    adapted = get_peft_model(model, LoraConfig(task_type=task_type, **(fields | config)))
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                weight.normal_(std=LORA_STD)
    return adapted
