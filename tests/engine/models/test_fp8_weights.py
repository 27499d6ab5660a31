"""Checkpoints in FP8: the formats they are stored in, and what is refused."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from pdserve_engine.kv.kv_cache import KVCacheSpec
from pdserve_engine.kv_transfer.compatibility import compatibility_hash
from pdserve_engine.models.config import ModelError
from pdserve_engine.models.quantization import Fp8Quantization, read_quantization
from pdserve_engine.models.registry import load_model, read_model_config
from pdserve_engine.models.weights.loader import Checkpoint, WeightPart
from pdserve_engine.models.weights.quantized import read_projection
from pdserve_kernels.fp8 import FP8, FP8_MAX
from support.checkpoints import change_config, change_tensors, logits_of, write
from support.model_driver import CPU, Driver, make_prompt

NUM_TOKENS = 20
BLOCK = 128
# Blocks that are whole and such that are not.
SHAPE = {
    "hidden_size": 192,
    "intermediate_size": 384,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 2,
}
MOE_SHAPE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 160,
}
# As Qwen3's and DeepSeek's checkpoints say it, and as AutoFP8's do.
FINE_GRAINED: dict[str, Any] = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "modules_to_not_convert": ["lm_head"],
    "quant_method": "fp8",
    "weight_block_size": [BLOCK, BLOCK],
}
AUTO_FP8: dict[str, Any] = {
    "activation_scheme": "static",
    "ignored_layers": ["lm_head"],
    "quant_method": "fp8",
}
# As llm-compressor writes its schemes FP8, FP8_DYNAMIC and FP8_BLOCK.
ARGUMENTS = {
    "actorder": None,
    "block_structure": None,
    "dynamic": False,
    "group_size": None,
    "num_bits": 8,
    "observer": "minmax",
    "observer_kwargs": {},
    "strategy": "tensor",
    "symmetric": True,
    "type": "float",
}
COMPRESSED: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "format": "float-quantized",
            "input_activations": ARGUMENTS | {"dynamic": True, "strategy": "token"},
            "output_activations": None,
            "targets": ["Linear"],
            "weights": ARGUMENTS,
        }
    },
    "format": "float-quantized",
    "global_compression_ratio": None,
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
    "sparsity_config": {},
    "transform_config": {},
    "version": "0.12.3",
}


def compressed(activations: object = None, **weights: object) -> dict[str, Any]:
    """COMPRESSED with other fields of its weights, and other activations."""
    (group,) = COMPRESSED["config_groups"].values()
    changed = group | {"weights": ARGUMENTS | weights}
    if activations is not None:
        changed["input_activations"] = activations
    return COMPRESSED | {"config_groups": {"group_0": changed}}


class Weight(NamedTuple):
    """A weight in FP8, and what it stands for, in fp32."""

    values: torch.Tensor
    scales: torch.Tensor
    dense: torch.Tensor


def quantize(weight: torch.Tensor, blocks: tuple[int, int], dtype: torch.dtype) -> Weight:
    """Round by hand, a block at a time, with scales [rows, columns] of blocks."""
    rows, columns = blocks
    values, dense = weight.to(FP8), weight.clone()
    grid = [-(-size // block) for size, block in zip(weight.shape, blocks, strict=True)]
    scales = torch.empty(grid, dtype=dtype)
    for i in range(grid[0]):
        for j in range(grid[1]):
            part = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scale = scales[i, j] = (weight[part].abs().max() / FP8_MAX).to(dtype)
            values[part] = (weight[part] / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)
            dense[part] = values[part].float() * scale.float()
    return Weight(values, scales, dense)


Store = Callable[[torch.Tensor], tuple[dict[str, torch.Tensor], torch.Tensor]]


def store_blocks(
    weight: torch.Tensor, *, name: str = "weight_scale_inv", dtype: torch.dtype = torch.float32
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    stored = quantize(weight, (BLOCK, BLOCK), dtype)
    return {"weight": stored.values, name: stored.scales}, stored.dense


def store_channels(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    stored = quantize(weight, (1, weight.shape[1]), torch.bfloat16)
    return {"weight": stored.values, "weight_scale": stored.scales}, stored.dense


def store_whole(
    weight: torch.Tensor,
    *,
    shape: tuple[int, ...] = (1,),
    name: str = "weight_scale",
    activations: str | None = "input_scale",
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    stored = quantize(weight, (weight.shape[0], weight.shape[1]), torch.float32)
    tensors = {"weight": stored.values, name: stored.scales.reshape(shape)}
    if activations is not None:
        tensors[activations] = torch.full(shape, 0.02)
    return tensors, stored.dense


store_as_transformers = partial(
    store_whole, shape=(), name="weight_scale_inv", activations="activation_scale"
)
FORMATS = [
    pytest.param(FINE_GRAINED, store_blocks, id="DeepSeek's"),
    pytest.param(FINE_GRAINED, partial(store_blocks, dtype=torch.bfloat16), id="Qwen3's"),
    pytest.param(AUTO_FP8, partial(store_whole, shape=()), id="AutoFP8's"),
    pytest.param(
        AUTO_FP8 | {"weight_block_size": None}, store_as_transformers, id="transformers' whole"
    ),
    pytest.param(compressed(), store_whole, id="FP8"),
    pytest.param(compressed(strategy="channel"), store_channels, id="FP8_DYNAMIC"),
    pytest.param(
        compressed(
            ARGUMENTS | {"dynamic": True, "strategy": "group", "group_size": BLOCK},
            strategy="block",
            block_structure=[BLOCK, BLOCK],
        ),
        partial(store_blocks, name="weight_scale", dtype=torch.bfloat16),
        id="FP8_BLOCK",
    ),
]


class Stored(NamedTuple):
    """A checkpoint in FP8, and the same weights as a dense one."""

    folder: Path
    dense: Path


@pytest.fixture
def make_stored(make_model: Callable[..., Path], tmp_path: Path) -> Callable[..., Stored]:
    """make_stored(quantization_config, store, **shape) of a Qwen2: q, k and v have biases."""

    def make(
        quantization: dict[str, Any],
        store: Store,
        architecture: str = "Qwen2ForCausalLM",
        **shape: Any,
    ) -> Stored:
        source = make_model(architecture, **SHAPE | shape)
        dense = load_file(source / "model.safetensors")
        stored = dict(dense)
        for name, tensor in load_file(source / "model.safetensors").items():
            if name.endswith("_proj.weight"):
                parts, dense[name] = store(tensor)
                stem = name.removesuffix("weight")
                stored |= {stem + part: value for part, value in parts.items()}
        result = Stored(tmp_path / "quantized", tmp_path / "dense")
        write(source, result.folder, stored, quantization)
        write(source, result.dense, dense, None)
        return result

    return make


def load(folder: Path) -> None:
    load_model(folder, read_model_config(folder), device=CPU)


@pytest.mark.parametrize(("quantization", "store"), FORMATS)
def test_a_checkpoint_in_fp8_is_the_dense_one_it_stands_for(
    make_stored: Callable[..., Stored], quantization: dict[str, Any], store: Store
) -> None:
    stored = make_stored(quantization, store)
    for dtype in ("float32", "bfloat16"):
        expected = logits_of(stored.dense, dtype=dtype)
        assert torch.equal(logits_of(stored.folder, dtype=dtype), expected)


@pytest.mark.parametrize(("quantization", "store"), FORMATS)
def test_experts_in_fp8_are_the_dense_ones_that_they_stand_for(
    make_stored: Callable[..., Stored], quantization: dict[str, Any], store: Store
) -> None:
    stored = make_stored(quantization, store, "Qwen2MoeForCausalLM", **MOE_SHAPE)
    for dtype in ("float32", "bfloat16"):
        expected = logits_of(stored.dense, dtype=dtype)
        assert torch.equal(logits_of(stored.folder, dtype=dtype), expected)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_the_scale_of_a_single_block_may_have_any_shape(
    make_stored: Callable[..., Stored], shape: tuple[int, ...]
) -> None:
    stored = make_stored(FINE_GRAINED, store_blocks, hidden_size=128, num_attention_heads=4)
    name = "model.layers.0.self_attn.k_proj.weight_scale_inv"
    change_tensors(
        stored.folder, lambda tensors: tensors.update({name: tensors[name].reshape(shape)})
    )
    assert torch.equal(logits_of(stored.folder), logits_of(stored.dense))


@pytest.mark.parametrize(("quantization", "store"), FORMATS)
def test_a_head_that_is_stored_beside_a_tied_embedding_is_not_read(
    make_stored: Callable[..., Stored], quantization: dict[str, Any], store: Store
) -> None:
    """Tools quantize it, and leave the embedding as it is."""
    stored = make_stored(quantization, store, tie_word_embeddings=True)
    expected = logits_of(stored.folder)
    head, _ = store(torch.ones(shape_of_head(stored.folder)))
    change_tensors(
        stored.folder,
        lambda tensors: tensors.update({f"lm_head.{part}": value for part, value in head.items()}),
    )
    assert torch.equal(logits_of(stored.folder), expected)
    scales = [f"lm_head.{part}" for part in head if part != "weight"]
    change_tensors(stored.folder, lambda tensors: [tensors.pop(name) for name in scales])
    assert torch.equal(logits_of(stored.folder), expected)
    change_tensors(stored.folder, lambda tensors: tensors.update({"lm_head.bias": torch.ones(3)}))
    with pytest.raises(ModelError, match=r"lm_head\.bias is not zero"):
        load(stored.folder)


def shape_of_head(folder: Path) -> torch.Size:
    return load_file(folder / "model.safetensors")["model.embed_tokens.weight"].shape


@pytest.mark.parametrize(
    ("quantization", "store"), [FORMATS[0], FORMATS[1], FORMATS[3]], ids=["blocks", "bf16", "whole"]
)
def test_greedy_text_is_that_of_transformers_own_reading(
    make_stored: Callable[..., Stored],
    hf_greedy: Callable[..., list[int]],
    quantization: dict[str, Any],
    store: Store,
) -> None:
    """It makes the weights dense by code of its own, which wants blocks of equal size."""
    folder = make_stored(
        quantization, store, hidden_size=256, num_attention_heads=8, num_key_value_heads=4
    ).folder
    driver = Driver(folder)
    for length in (5, 40):
        prompt = make_prompt(length)
        request = driver.add(str(length), prompt)
        driver.run(str(length), num_tokens=NUM_TOKENS, chunk=16)
        assert request.output == hf_greedy(folder, prompt, NUM_TOKENS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (FINE_GRAINED | {"quant_method": ["fp8"]}, r"quant_method is \['fp8'\], supported are"),
        (FINE_GRAINED | {"fmt": "e5m2"}, "quantization_config.fmt is e5m2, supported is e4m3"),
        (
            FINE_GRAINED | {"weight_block_size": [1, 32]},
            r"weight_block_size is \[1, 32\], supported is None, \[128, 128\]",
        ),
        (FINE_GRAINED | {"activation_scheme": "group"}, "activation_scheme is group"),
        (FINE_GRAINED | {"scale_fmt": "e5m3"}, "scale_fmt is e5m3, supported is float, ue8m0"),
        (FINE_GRAINED | {"modules_to_convert": ["embed_tokens"]}, "modules_to_convert is"),
        (AUTO_FP8 | {"kv_cache_scheme": "static"}, "kv_cache_scheme is static, supported is None"),
        (COMPRESSED | {"format": "mxfp8-quantized"}, "format is mxfp8-quantized, supported is pac"),
        (compressed(type="int"), r"group_0\.weights\.type is int, supported is float"),
        (compressed(num_bits=4), r"weights\.num_bits is 4, supported is 8"),
        (compressed(strategy="group"), r"weights\.strategy is group, supported is tensor, channel"),
        (compressed(symmetric=False), r"weights\.symmetric is False, supported is True"),
        (compressed(dynamic=True), r"weights\.dynamic is True, supported is False"),
        (
            compressed(strategy="block"),
            r"weights\.block_structure is None, supported is \[128, 128\]",
        ),
        (
            compressed(strategy="block", block_structure=[64, 64]),
            r"weights\.block_structure is \[64, 64\]",
        ),
        (compressed(ARGUMENTS | {"type": "int"}), r"input_activations\.type is int, supported is"),
        (compressed(ARGUMENTS | {"num_bits": 4}), r"input_activations\.num_bits is 4"),
        (
            COMPRESSED | {"config_groups": {"a": {"weights": {"num_bits": 8, "strategy": "x"}}}},
            r"a\.weights\.strategy is x",
        ),
        (
            COMPRESSED | {"config_groups": {"a": {"weights": {"type": "float"}}}},
            r"a\.weights has no num_bits",
        ),
        (COMPRESSED | {"config_groups": {"a": {}, "b": {}}}, "supported is one group"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_schemes_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_quantization({"quantization_config": changes}, None)


Q_PROJ = "model.layers.0.self_attn.q_proj"
DOWN_PROJ = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (f"{Q_PROJ}.weight", torch.Tensor.float, "is stored as F32, must be F8_E4M3 as it has a"),
        (
            f"{Q_PROJ}.weight",
            lambda weight: weight.float().to(torch.float8_e5m2),
            "is stored as F8_E5M2, must be F8_E4M3",
        ),
        (f"{DOWN_PROJ}.weight", lambda weight: weight[1:], r"has shape \(191, 384\), the config"),
        (f"{DOWN_PROJ}.weight_scale_inv", lambda scales: scales[:1], r"has shape \(1, 3\), .*2, 3"),
        (f"{Q_PROJ}.weight_scale_inv", torch.Tensor.flatten, r"has shape \(4,\), .*\(2, 2\)"),
        (f"{Q_PROJ}.weight_scale_inv", torch.Tensor.int, "weight_scale_inv is torch.int32, must"),
        (
            f"{Q_PROJ}.weight_scale_inv",
            lambda scales: scales.to(torch.float8_e8m0fnu),
            "weight_scale_inv is stored as F8_E8M0, which is not supported",
        ),
        (f"{Q_PROJ}.weight_scale_inv", torch.Tensor.neg, "has numbers that are negative or not"),
        (f"{Q_PROJ}.weight_scale_inv", lambda scales: scales / 0, "has numbers that are negative"),
        (
            f"{Q_PROJ}.weight_scale_inv",
            None,
            rf"{Q_PROJ}\.weight is stored as F8_E4M3, and nothing says what scale that has",
        ),
        ("model.embed_tokens.weight", lambda table: table.to(FP8), "embed_tokens.*stored as F8_E4"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    make_stored: Callable[..., Stored], name: str, change: Any, message: str
) -> None:
    folder = make_stored(FINE_GRAINED, store_blocks).folder
    load(folder)

    def apply(tensors: dict[str, torch.Tensor]) -> None:
        tensor = tensors.pop(name)
        if change is not None:
            tensors[name] = change(tensor).contiguous()

    change_tensors(folder, apply)
    with pytest.raises(ModelError, match=message):
        load(folder)


def test_a_dense_model_has_no_weights_in_fp8(make_stored: Callable[..., Stored]) -> None:
    """Read as they are they would be another model, without their scales."""
    folder = make_stored(FINE_GRAINED, store_blocks).folder
    change_config(folder, quantization_config=None)
    with pytest.raises(ModelError, match=r"has no place for: .*weight_scale_inv"):
        load(folder)
    change_tensors(
        folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if "_scale" in name]
    )
    with pytest.raises(ModelError, match="stored as F8_E4M3, and nothing says what scale"):
        load(folder)


@pytest.mark.parametrize("name", ["model.embed_tokens.weight_scale_inv", "model.norm.weight_scale"])
def test_only_linears_have_scales(make_stored: Callable[..., Stored], name: str) -> None:
    folder = make_stored(FINE_GRAINED, store_blocks).folder
    change_tensors(folder, lambda tensors: tensors.update({name: torch.ones(2, 2)}))
    with pytest.raises(ModelError, match=rf"has 1 weights the model has no place for: {name}"):
        load(folder)


def test_products_whose_weights_are_not_all_in_fp8_are_refused(
    make_stored: Callable[..., Stored],
) -> None:
    folder = make_stored(FINE_GRAINED, store_blocks).folder

    def make_dense(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[f"{Q_PROJ}.weight_scale_inv"]
        tensors[f"{Q_PROJ}.weight"] = tensors[f"{Q_PROJ}.weight"].float()

    change_tensors(folder, make_dense)
    with pytest.raises(ModelError, match="which are one product, only some are quantized"):
        load(folder)


def read_part(folder: Path, part: WeightPart, shape: tuple[int, int]) -> torch.Tensor:
    quantization = Fp8Quantization(method="fp8", scales="block")
    weight = read_projection(
        Checkpoint(folder), [(part, shape)], quantization, dtype=torch.float32, device=CPU
    )
    assert not isinstance(weight, torch.Tensor)
    return weight.dequantize()


def test_ranks_have_parts_of_blocks_by_rows_and_whole_ones_by_inputs(
    make_stored: Callable[..., Stored],
) -> None:
    stored = make_stored(FINE_GRAINED, store_blocks)
    dense = load_file(stored.dense / "model.safetensors")[f"{DOWN_PROJ}.weight"]
    part = WeightPart(DOWN_PROJ, slice(96, 192), slice(128, 384))
    assert torch.equal(read_part(stored.folder, part, (192, 384)), dense[96:, 128:])
    part = WeightPart(DOWN_PROJ, slice(0, 192), slice(192, 384))
    message = f"{DOWN_PROJ}: inputs 192 to 384 of 384 are not whole groups of 128"
    with pytest.raises(ModelError, match=message):
        read_part(stored.folder, part, (192, 384))


def test_peers_agree_by_the_checkpoint_and_how_it_is_quantized(
    make_stored: Callable[..., Stored],
) -> None:
    stored = make_stored(FINE_GRAINED, store_blocks)

    def hash_of(folder: Path, **options: Any) -> str:
        config = read_model_config(folder, **options)
        layout = KVCacheSpec.from_model(config, block_size=16, device=CPU).layout()
        return compatibility_hash(folder, config, layout)

    same = {hash_of(stored.folder) for _ in range(2)}
    assert len(same) == 1
    others = {hash_of(stored.dense), hash_of(stored.dense, quantization="fp8")}
    assert len(others | same) == 3
    with pytest.raises(ModelError, match="quantization is fp8, but the checkpoint is quantized al"):
        read_model_config(stored.folder, quantization="fp8")
