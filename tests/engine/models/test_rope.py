"""Random rope settings of a `config.json`: what transformers computes from them, or a refusal."""

import json
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pdserve_engine.models.config import FAMILIES, LlamaConfig, ModelError
from pdserve_engine.models.registry import read_model_config
from pdserve_engine.models.rope import build_cos_sin_cache
from support.model_driver import Driver, make_prompt
from support.models import EXPERTS
from support.samples import seeds

NUM_CASES = 25
MODEL_LENGTH, NUM_ANGLES, NUM_TOKENS = 96, 8, 6
ORIGINAL = "original_max_position_embeddings"
FIELDS = re.compile(r"rope_|partial_rotary_factor|max_position_embeddings|_factor|layer type")


def draw(rng: random.Random, *usual: Any) -> Any:
    """One of the usual values, and now and then one that is none."""
    return rng.choice(usual if rng.random() < 0.95 else (None, 0, -2.0, "2.0", True, 0.5))


def draw_rope(rng: random.Random) -> dict[str, Any]:
    kind = rng.choice(["default", "linear", "dynamic", "yarn", "longrope", "llama3"])
    rope: dict[str, Any] = {rng.choice(["rope_type", "rope_type", "type"]): kind}
    if rng.random() < 0.1:
        rope["type"] = rng.choice(["default", "linear"])
    if kind != "default":
        rope["factor"] = draw(rng, 2.0, 4, 3.5)
    if kind in ("yarn", "longrope", "llama3"):
        rope[ORIGINAL] = draw(rng, 32, 48, 64)
    if kind == "llama3":
        rope |= {"low_freq_factor": draw(rng, 1.0, 1.5), "high_freq_factor": draw(rng, 4.0, 3)}
    if kind == "longrope":
        for name in ("short_factor", "long_factor"):
            length = NUM_ANGLES if rng.random() < 0.9 else rng.choice([1, 4, 9])
            rope[name] = [rng.choice([1.0, 1.5, 2.0, 4]) for _ in range(length)]
    if kind in ("yarn", "longrope") and rng.random() < 0.3:
        rope["attention_factor"] = draw(rng, 1.2, 0.8)
    if kind == "yarn":
        optional = {"beta_fast": 16.0, "beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 0.8}
        rope |= {name: value for name, value in optional.items() if rng.random() < 0.2}
        rope |= {"truncate": False} if rng.random() < 0.2 else {}
    if rng.random() < 0.5:
        rope["rope_theta"] = draw(rng, 5000.0, 20000, 1e6)
    if rng.random() < 0.2:
        rope["partial_rotary_factor"] = draw(rng, 1.0, 1.0, 0.5)
    needed = {"rope_type", "type"}
    return {k: v for k, v in rope.items() if k in needed or rng.random() < 0.95}


def draw_settings(rng: random.Random) -> dict[str, Any]:
    """Settings in any of the fields that a file may have them in, often in several."""
    settings: dict[str, Any] = {}
    for field, share in (("rope_parameters", 0.6), ("rope_scaling", 0.45)):
        if rng.random() < share:
            by_layer_type = {"full_attention": draw_rope(rng), "sliding_attention": draw_rope(rng)}
            kinds = [draw_rope(rng), rng.choice([None, {}]), by_layer_type]
            settings[field] = rng.choices(kinds, weights=(88, 5, 7))[0]
    if rng.random() < 0.5:
        settings["rope_theta"] = draw(rng, 7000.0, 30000, 1e6)
    if rng.random() < 0.25:
        settings["partial_rotary_factor"] = draw(rng, 1.0, 1.0, 0.5)
    if rng.random() < 0.25:
        settings[ORIGINAL] = draw(rng, 32, 64, MODEL_LENGTH)
    return settings


def run_transformers(
    folder: Path, architecture: str, prompt: list[int], length: int
) -> tuple[torch.Tensor, list[int]] | None:
    """Return its cosines beside its sines for `length` positions and the tokens that it generates;
    None if it does not run the model.
    """
    try:
        model = getattr(transformers, architecture).from_pretrained(folder, dtype=torch.float32)
        with torch.inference_mode():
            angles = model.model.rotary_emb(torch.zeros(1), torch.arange(length)[None])
            token_ids = torch.tensor([prompt])
            tokens = model.generate(
                token_ids,
                attention_mask=torch.ones_like(token_ids),
                max_new_tokens=NUM_TOKENS,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
    # Each kind of settings fails in its own way.
    except Exception:
        return None
    halves = [table[0, :, : table.shape[-1] // 2] for table in angles]
    return torch.cat(halves, dim=-1), tokens[0, len(prompt) :].tolist()


def check_named(refusal: str) -> None:
    assert FIELDS.search(refusal), refusal


def check_case(folder: Path, architecture: str, max_model_len: int | None) -> str:
    """Return what has become of the settings in the folder."""
    length = max_model_len or MODEL_LENGTH
    prompt = make_prompt(length - NUM_TOKENS - 1)
    theirs = run_transformers(folder, architecture, prompt, length)
    try:
        config = read_model_config(folder, model_impl="native", max_model_len=max_model_len)
    except ModelError as error:
        check_named(str(error))
    else:
        assert isinstance(config, LlamaConfig)
        assert theirs is not None, "transformers does not run it"
        ours = build_cos_sin_cache(
            config.rope, head_dim=config.head_dim, max_positions=length, dtype=torch.float32
        )
        assert torch.equal(ours, theirs[0])
        return "native"
    try:
        driver = Driver(folder, max_model_len=max_model_len, num_blocks=16)
    except ModelError as error:
        check_named(str(error).partition("(not run natively")[0])
        return "refused"
    driver.add("a", prompt)
    driver.run("a", num_tokens=NUM_TOKENS, chunk=20)
    assert theirs is not None, "transformers does not run it"
    assert driver.sequences["a"].output == theirs[1]
    return "backend"


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("seed", seeds(10, kept=1))
def test_settings_mean_what_they_mean_to_transformers_or_are_refused_by_name(
    make_model: Callable[..., Path], tmp_path: Path, architecture: str, seed: int
) -> None:
    experts = EXPERTS | {"num_local_experts": 4, "num_experts": 4}
    fields = experts if FAMILIES[architecture].experts else {}
    saved = make_model(architecture, max_position_embeddings=MODEL_LENGTH, **fields)
    (tmp_path / "model.safetensors").symlink_to(saved / "model.safetensors")
    raw = json.loads((saved / "config.json").read_text())
    del raw["rope_parameters"]
    rng = random.Random(f"{architecture} {seed}")
    outcomes: Counter[str] = Counter()
    for _ in range(NUM_CASES):
        settings = draw_settings(rng)
        (tmp_path / "config.json").write_text(json.dumps(raw | settings))
        max_model_len = rng.choice([None, None, 32, 48, 64])
        try:
            outcomes[check_case(tmp_path, architecture, max_model_len)] += 1
        except Exception as error:
            raise AssertionError(f"{settings}, max_model_len {max_model_len}") from error
    assert min(outcomes[name] for name in ("native", "backend", "refused")) > 0, outcomes
