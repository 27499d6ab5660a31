"""Quantized models: the formats they are stored in, and what rounding at load time costs."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from pdserve_engine.kv.kv_cache import KVCacheSpec
from pdserve_engine.kv_transfer.compatibility import compatibility_hash
from pdserve_engine.models.config import ModelError
from pdserve_engine.models.quantization import IntQuantization, Quantization, read_quantization
from pdserve_engine.models.registry import load_model, read_model_config
from pdserve_engine.models.weights.loader import Checkpoint, WeightPart
from pdserve_engine.models.weights.quantized import read_projection, round_at_load
from pdserve_kernels import name_of, select
from pdserve_kernels.reference.quantization import QuantizedWeight
from support.checkpoints import change_tensors, logits_of, write
from support.kernels import without_compiled_kernels
from support.model_driver import CPU, Driver, make_prompt, record_logits
from support.models import NATIVE_MODELS
from support.samples import sampled

TINY = Path(__file__).parents[3] / "models" / "pdserve-tiny"
TEXTS = 24
NUM_TOKENS = 24
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
# As tools write them, with all that says nothing about the numbers.
FROM_LLM_COMPRESSOR: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": 128,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "strategy": "group",
                "symmetric": True,
                "type": "int",
            },
        }
    },
    "format": "pack-quantized",
    "global_compression_ratio": 1.8919,
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "frozen",
    "sparsity_config": {
        "format": "dense",
        "global_sparsity": 0.1422,
        "ignore": [],
        "registry_requires_subclass": False,
        "sparsity_structure": "unstructured",
        "targets": [],
    },
    "version": "0.8.1",
}
FROM_AUTO_GPTQ: dict[str, Any] = {
    "bits": 4,
    "damp_percent": 0.1,
    "desc_act": True,
    "group_size": -1,
    "is_marlin_format": False,
    "model_file_base_name": "model",
    "model_name_or_path": None,
    "quant_method": "gptq",
    "static_groups": False,
    "sym": True,
    "true_sequential": True,
}
FROM_GPTQMODEL: dict[str, Any] = {
    "bits": 4,
    "checkpoint_format": "gptq",
    "desc_act": True,
    "dynamic": None,
    "group_size": 32,
    "lm_head": False,
    "meta": {"damp_percent": 0.01, "quantizer": ["gptqmodel:1.4.0"], "static_groups": True},
    "pack_dtype": "int32",
    "quant_method": "gptq",
    "sym": True,
}


def compressed(**weights: object) -> dict[str, Any]:
    """FROM_LLM_COMPRESSOR with other fields of its weights; groups are of 32 if it does not say."""
    changed = copy.deepcopy(FROM_LLM_COMPRESSOR)
    changed["config_groups"]["group_0"]["weights"] |= {"group_size": 32} | weights
    return changed


COMPRESSED = compressed()


def load(folder: Path) -> None:
    load_model(folder, read_model_config(folder), device=CPU)


# Packing by hand, a number at a time.


def pack(unsigned: torch.Tensor, bits: int) -> torch.Tensor:
    """[r, c] -> int32 [r, ceil(c * bits / 32)], the first number in the lowest bits."""
    per_word = 32 // bits
    words = [
        [
            sum(number << (bits * place) for place, number in enumerate(row[start:][:per_word]))
            for start in range(0, len(row), per_word)
        ]
        for row in unsigned.tolist()
    ]
    return torch.tensor(words, dtype=torch.int64).to(torch.int32)


def shuffled_for_awq(unsigned: torch.Tensor) -> torch.Tensor:
    """Of each 8 columns first the even ones, then the odd ones."""
    eights = unsigned.unflatten(1, (-1, 8))
    return torch.cat((eights[:, :, ::2], eights[:, :, 1::2]), 2).flatten(1)


class Integers(NamedTuple):
    """Unsigned values [n, k] and zeros [n, groups] with scales [n, groups]."""

    values: torch.Tensor
    zeros: torch.Tensor
    scales: torch.Tensor
    bits: int
    group_size: int

    def dense(self) -> torch.Tensor:
        group = torch.arange(self.values.shape[1]) // self.group_size
        return (self.values - self.zeros[:, group]).float() * self.scales.float()[:, group]


def store_compressed(weight: Integers) -> dict[str, torch.Tensor]:
    return {
        "weight_packed": pack(weight.values, weight.bits),
        "weight_scale": weight.scales.to(torch.bfloat16),
        "weight_shape": torch.tensor(weight.values.shape),
        "weight_zero_point": pack(weight.zeros.T, weight.bits).T,
    }


def store_symmetric(weight: Integers) -> dict[str, torch.Tensor]:
    tensors = store_compressed(weight)
    del tensors["weight_zero_point"]
    return tensors


def store_awq(weight: Integers) -> dict[str, torch.Tensor]:
    return {
        "qweight": pack(shuffled_for_awq(weight.values.T), 4),
        "qzeros": pack(shuffled_for_awq(weight.zeros.T), 4),
        "scales": weight.scales.T.half(),
    }


def store_gptq(weight: Integers, *, less: int = 1) -> dict[str, torch.Tensor]:
    stored = (weight.zeros - less) % (1 << weight.bits)
    return {
        "qweight": pack(weight.values, weight.bits).T,
        "qzeros": pack(stored.T, weight.bits),
        "scales": weight.scales.T.half(),
        "g_idx": (torch.arange(weight.values.shape[1]) // weight.group_size).int(),
    }


def store_gptq_v2(weight: Integers) -> dict[str, torch.Tensor]:
    return store_gptq(weight, less=0)


def store_gptq_with_bias(weight: Integers) -> dict[str, torch.Tensor]:
    return store_gptq(weight) | {"bias": torch.zeros(len(weight.values), dtype=torch.float16)}


class Stored(NamedTuple):
    """A quantized checkpoint, and the same weights as a dense one."""

    folder: Path
    dense: Path


FORMATS = [
    pytest.param(COMPRESSED, store_symmetric, False, id="W4A16"),
    pytest.param(compressed(symmetric=False), store_compressed, True, id="W4A16 asymmetric"),
    pytest.param(compressed(num_bits=8), store_symmetric, False, id="W8A16"),
    pytest.param(
        compressed(num_bits=8, strategy="channel", group_size=None, symmetric=False),
        store_compressed,
        True,
        id="W8A16 by channel, asymmetric",
    ),
    pytest.param(AWQ, store_awq, True, id="AWQ"),
    pytest.param(GPTQ, store_gptq, True, id="GPTQ"),
    pytest.param(GPTQ | {"bits": 8, "group_size": -1}, store_gptq, True, id="GPTQ of 8 bits"),
    pytest.param(GPTQ | {"checkpoint_format": "gptq_v2"}, store_gptq_v2, True, id="GPTQ v2"),
    pytest.param(FROM_LLM_COMPRESSOR, store_symmetric, False, id="llm-compressor's"),
    pytest.param(FROM_AUTO_GPTQ, store_gptq_with_bias, False, id="AutoGPTQ's, with biases"),
    pytest.param(FROM_GPTQMODEL, store_gptq, False, id="GPTQModel's, of static groups"),
]


@pytest.fixture
def make_stored(make_model: Callable[..., Path], tmp_path: Path) -> Callable[..., Stored]:
    """make_stored(quantization_config, store, has_zeros) of a Qwen2: q, k and v have biases.

    The zero points of weights whose names end with one of `centred` are at the middle all the same.
    """

    def make(
        quantization: dict[str, Any],
        store: Callable[[Integers], dict[str, torch.Tensor]],
        has_zeros: bool,
        centred: tuple[str, ...] = (),
        model: tuple[str, dict[str, Any]] = ("Qwen2ForCausalLM", {}),
    ) -> Stored:
        architecture, overrides = model
        source = make_model(architecture, **overrides | {"num_hidden_layers": 1})
        torch.manual_seed(0)
        known = read_quantization({"quantization_config": quantization}, None)
        assert isinstance(known, IntQuantization)
        dense = load_file(source / "model.safetensors")
        stored: dict[str, torch.Tensor] = {}
        for name, tensor in dense.items():
            if not name.endswith(("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")):
                stored[name] = tensor
                continue
            weight = make_integers(tensor.shape, known, has_zeros and not name.endswith(centred))
            dense[name] = weight.dense()
            stem = name.removesuffix(".weight")
            # A bias of the model's stays.
            stored = {
                f"{stem}.{part}": t.contiguous() for part, t in store(weight).items()
            } | stored
        result = Stored(tmp_path / "quantized", tmp_path / "dense")
        write(source, result.folder, stored, quantization)
        write(source, result.dense, dense, None)
        return result

    return make


def make_integers(shape: torch.Size, quantization: IntQuantization, has_zeros: bool) -> Integers:
    bits, group_size = quantization.bits, quantization.group_size or shape[1]
    grid, half = (shape[0], -(-shape[1] // group_size)), 1 << (bits - 1)
    # Scales that neither fp16 nor bf16 has to round.
    scales = torch.randint(1, 128, grid) * 2.0**-7 / half
    zeros = torch.randint(1, 2 * half, grid) if has_zeros else torch.full(grid, half)
    return Integers(torch.randint(0, 2 * half, shape), zeros, scales, bits, group_size)


@pytest.mark.parametrize(("quantization", "store", "has_zeros"), FORMATS)
def test_a_quantized_checkpoint_is_the_dense_one_it_stands_for(
    make_stored: Callable[..., Stored],
    quantization: dict[str, Any],
    store: Callable[[Integers], dict[str, torch.Tensor]],
    has_zeros: bool,
) -> None:
    stored = make_stored(quantization, store, has_zeros)
    expected = logits_of(stored.dense, dtype="float32")
    assert torch.equal(logits_of(stored.folder, dtype="float32"), expected)
    in_bf16 = logits_of(stored.folder, dtype="bfloat16")
    assert (in_bf16 - expected)[0].std() < 0.05 * expected[0].std()


@pytest.mark.parametrize("name", sampled(["mixtral", "qwen2-moe"], "qwen2-moe"))
@pytest.mark.parametrize(("quantization", "store", "has_zeros"), FORMATS)
def test_a_quantized_checkpoint_with_experts_is_the_dense_one_it_stands_for(
    make_stored: Callable[..., Stored],
    quantization: dict[str, Any],
    store: Callable[[Integers], dict[str, torch.Tensor]],
    has_zeros: bool,
    name: str,
) -> None:
    """The router and a shared expert's gate are dense in both."""
    stored = make_stored(quantization, store, has_zeros, model=NATIVE_MODELS[name])
    expected = logits_of(stored.dense, dtype="float32")
    assert torch.equal(logits_of(stored.folder, dtype="float32"), expected)
    in_bf16 = logits_of(stored.folder, dtype="bfloat16")
    # Rounding may choose other experts.
    assert (in_bf16 - expected)[0].std() < 0.3 * expected[0].std()


def test_some_experts_may_be_dense_and_a_router_has_to_be(
    make_stored: Callable[..., Stored],
) -> None:
    stored = make_stored(COMPRESSED, store_symmetric, False, model=NATIVE_MODELS["qwen2-moe"])
    dense = load_file(stored.dense / "model.safetensors")
    stem, router = "model.layers.0.mlp.experts.2.down_proj", "model.layers.0.mlp.gate"

    def make_dense(tensors: dict[str, torch.Tensor]) -> None:
        for part in ("weight_packed", "weight_scale", "weight_shape"):
            del tensors[f"{stem}.{part}"]
        tensors[f"{stem}.weight"] = dense[f"{stem}.weight"]

    change_tensors(stored.folder, make_dense)
    expected = logits_of(stored.dense, dtype="float32")
    assert torch.equal(logits_of(stored.folder, dtype="float32"), expected)
    assert logits_of(stored.folder, dtype="bfloat16").isfinite().all()

    def quantize_router(tensors: dict[str, torch.Tensor]) -> None:
        known = read_quantization({"quantization_config": COMPRESSED}, None)
        assert isinstance(known, IntQuantization)
        integers = make_integers(tensors.pop(f"{router}.weight").shape, known, False)
        tensors |= {f"{router}.{part}": t for part, t in store_symmetric(integers).items()}

    change_tensors(stored.folder, quantize_router)
    with pytest.raises(ModelError, match=rf"lacks 1 weights: {router}\.weight"):
        load(stored.folder)


@pytest.mark.parametrize("method", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe"])
def test_experts_rounded_at_load_time_are_the_dense_ones_that_they_stand_for(
    make_model: Callable[..., Path], tmp_path: Path, name: str, method: Any
) -> None:
    architecture, overrides = NATIVE_MODELS[name]
    source = make_model(architecture, **overrides)
    quantization = read_quantization({}, method)
    assert quantization is not None
    dense = load_file(source / "model.safetensors")
    for key, weight in dense.items():
        if key == "lm_head.weight":
            dense[key] = rounded(weight, quantization.of_lm_head)
        elif key.endswith(("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")):
            dense[key] = rounded(weight, quantization)
    write(source, tmp_path / "dense", dense, None)
    expected = logits_of(tmp_path / "dense", dtype="float32")
    found = logits_of(source, dtype="float32", quantization=method)
    assert torch.equal(found, expected)


def rounded(weight: torch.Tensor, quantization: Quantization) -> torch.Tensor:
    found = round_at_load(weight, quantization)
    assert isinstance(found, QuantizedWeight)
    return found.dequantize()


@pytest.mark.parametrize("name", ["llama", "qwen2-moe"])
@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_a_request_gets_the_same_bits_whole_and_in_chunks(
    make_model: Callable[..., Path], quantization: str, name: str
) -> None:
    architecture, overrides = NATIVE_MODELS[name]
    folder = make_model(architecture, **overrides)
    settings = {"dtype": "bfloat16", "quantization": quantization}
    assert torch.equal(logits_of(folder, **settings), logits_of(folder, chunk=7, **settings))


def next_tokens(driver: Driver, texts: list[list[int]]) -> torch.Tensor:
    """Log-probabilities [len(texts), vocab_size] of what follows each text."""
    seen = record_logits(driver)
    for index, text in enumerate(texts):
        driver.add(f"{index}", text)
        driver.step({f"{index}": len(text)})
        driver.finish(f"{index}")
    return torch.cat(seen).log_softmax(-1)


@pytest.fixture(scope="module")
def written() -> list[list[int]]:
    """What the dense tiny model writes, cut off at several places: texts that it knows well."""
    driver = Driver(TINY)
    texts = []
    for seed in range(TEXTS):
        request = driver.add(f"{seed}", make_prompt(3, seed=seed))
        driver.run(f"{seed}", num_tokens=NUM_TOKENS)
        texts += [request.token_ids[:length] for length in (8, 15, 22)]
        driver.finish(f"{seed}")
    return texts


@pytest.mark.parametrize(
    ("quantization", "largest_divergence", "least_agreement"),
    [("int8", 0.001, 0.97), ("fp8", 0.005, 0.95), ("int4", 0.05, 0.85)],
)
def test_rounding_hardly_changes_what_the_model_says(
    written: list[list[int]],
    quantization: Any,
    largest_divergence: float,
    least_agreement: float,
) -> None:
    dense = next_tokens(Driver(TINY), written)
    rounded = next_tokens(Driver(TINY, quantization=quantization), written)
    divergence = (dense.exp() * (dense - rounded)).sum(-1).mean().item()
    agreement = (dense.argmax(-1) == rounded.argmax(-1)).float().mean().item()
    assert 0 < divergence < largest_divergence
    assert agreement >= least_agreement


def test_peers_of_another_quantization_refuse_each_other(make_model: Callable[..., Path]) -> None:
    folder = make_model()
    hashes = set()
    for quantization in (None, "int8", "int4", "fp8"):
        config = read_model_config(folder, quantization=quantization)  # type: ignore[arg-type]
        layout = KVCacheSpec.from_model(config, block_size=16, device=CPU).layout()
        hashes.add(compatibility_hash(folder, config, layout))
    assert len(hashes) == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_method": "hqq"}, "quant_method is hqq, supported are compressed-tensors, awq,"),
        (COMPRESSED | {"format": "int-quantized"}, "config.format is int-quantized, supported is"),
        (COMPRESSED | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme is"),
        (
            COMPRESSED | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config.format is sparse-24-bitmask, supported is dense",
        ),
        (COMPRESSED | {"sparsity_config": "dense"}, "sparsity_config is 'dense', must be an obj"),
        (COMPRESSED | {"quantization_status": "calibration"}, "quantization_status is calibration"),
        (COMPRESSED | {"config_groups": {}}, "config_groups is {}, supported is one group"),
        (compressed(num_bits=3), r"group_0\.weights\.num_bits is 3, supported is 4, 8"),
        (compressed(type="float"), r"weights\.type is float"),
        (compressed(strategy="tensor"), r"weights\.strategy is tensor"),
        (compressed(actorder="group"), r"weights\.actorder is group"),
        (compressed(group_size=33), r"weights\.group_size is 33, must be -1 or even"),
        (AWQ | {"version": "gemv"}, "version is gemv"),
        (AWQ | {"bits": 8}, "bits is 8, supported is 4"),
        (AWQ | {"zero_point": False}, "zero_point is False"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format is marlin"),
        (GPTQ | {"dynamic": {"+:.*": {"bits": 8}}}, "dynamic is"),
        ({"quant_method": "gptq", "bits": 4}, "quantization_config has no group_size"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_checkpoint_asks_beyond_that_is_refused_by_name(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read_quantization({"quantization_config": changes}, None)


def test_a_quantized_checkpoint_is_not_quantized_again() -> None:
    with pytest.raises(ValueError, match="quantization is int8, but the checkpoint is quantized"):
        read_quantization({"quantization_config": AWQ}, "int8")


def test_scattered_groups_and_half_quantized_products_are_refused(
    make_stored: Callable[..., Stored],
) -> None:
    folder = make_stored(GPTQ, store_gptq, True).folder
    stem = "model.layers.0.self_attn.v_proj"

    change_tensors(folder, lambda tensors: tensors[f"{stem}.g_idx"].copy_(torch.arange(64) % 2))
    with pytest.raises(ModelError, match=rf"{stem}: g_idx scatters .* \(desc_act\)"):
        load(folder)
    change_tensors(folder, lambda tensors: tensors.pop(f"{stem}.scales"))
    with pytest.raises(ModelError, match=rf"lacks 1 weights: {stem}\.scales"):
        load(folder)

    def make_dense(tensors: dict[str, torch.Tensor]) -> None:
        for part in ("qweight", "qzeros", "g_idx"):
            del tensors[f"{stem}.{part}"]
        tensors[f"{stem}.weight"] = torch.zeros(32, 64)

    change_tensors(folder, make_dense)
    with pytest.raises(ModelError, match="which are one product, only some are quantized"):
        load(folder)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize(
    ("config", "store", "name"),
    [(GPTQ, store_gptq, "scales"), (COMPRESSED, store_symmetric, "weight_scale")],
    ids=["gptq", "compressed-tensors"],
)
def test_scales_that_are_not_finite_are_refused(
    make_stored: Callable[..., Stored],
    config: dict[str, Any],
    store: Callable[..., Any],
    name: str,
    value: float,
) -> None:
    folder = make_stored(config, store, False).folder
    stem = "model.layers.0.self_attn.v_proj"
    change_tensors(folder, lambda tensors: tensors[f"{stem}.{name}"][0].fill_(value))
    with pytest.raises(ModelError, match=rf"{stem}: scales have numbers that are not finite"):
        load(folder)


def test_parts_of_one_product_may_have_all_zero_points_at_the_middle(
    make_stored: Callable[..., Stored],
) -> None:
    stored = make_stored(GPTQ, store_gptq, True, centred=("v_proj.weight", "gate_proj.weight"))
    expected = logits_of(stored.dense, dtype="float32")
    assert torch.equal(logits_of(stored.folder, dtype="float32"), expected)


def test_zero_points_that_are_all_at_the_middle_are_left_out(
    make_stored: Callable[..., Stored],
) -> None:
    folder = make_stored(FROM_GPTQMODEL, store_gptq, False).folder
    quantization = read_quantization({"quantization_config": FROM_GPTQMODEL}, None)
    weight = read_projection(
        Checkpoint(folder),
        [
            (WeightPart(f"model.layers.0.self_attn.{name}_proj"), (64 if name == "q" else 32, 64))
            for name in "qkv"
        ],
        quantization,
        dtype=torch.bfloat16,
        device=CPU,
    )
    assert isinstance(weight, QuantizedWeight)
    assert weight.zeros is None


def test_parts_of_one_product_that_differ_are_refused_by_their_names(
    make_stored: Callable[..., Stored],
) -> None:
    folder = make_stored(COMPRESSED, store_symmetric, False).folder
    name = "model.layers.0.self_attn.v_proj.weight_scale"
    change_tensors(folder, lambda tensors: tensors.update({name: tensors[name].float()}))
    with pytest.raises(ModelError, match=r"q_proj, .*k_proj, .*v_proj: weights differ in"):
        load(folder)


def test_a_bias_that_the_model_would_leave_out_must_be_zero(
    make_stored: Callable[..., Stored],
) -> None:
    folder = make_stored(FROM_AUTO_GPTQ, store_gptq_with_bias, False).folder
    name = "model.layers.0.mlp.down_proj.bias"

    change_tensors(folder, lambda tensors: tensors[name][7:8].fill_(0.5))
    with pytest.raises(ModelError, match=rf"{name} is not zero, and the model has no place for it"):
        load(folder)
    change_tensors(folder, lambda tensors: tensors.update({name: torch.zeros(3)}))
    with pytest.raises(ModelError, match=rf"{name} has shape \(3,\), the config asks \(64,\)"):
        load(folder)


@pytest.mark.parametrize(
    ("quantization", "dtype", "is_compiled", "message"),
    [
        ("int8", "bfloat16", True, None),
        (None, "float32", False, None),
        ("int8", "float32", True, "in float32 the cpu/"),
        ("int4", "bfloat16", False, "in bfloat16 the reference kernels"),
        ("fp8", "bfloat16", True, "those of CUDA keep FP8"),
        ("fp8", "bfloat16", False, "those of CUDA keep FP8"),
    ],
)
def test_it_says_where_quantization_saves_nothing(
    make_model: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    quantization: Any,
    dtype: Any,
    is_compiled: bool,
    message: str | None,
) -> None:
    if is_compiled and name_of(select(CPU)) == "reference":
        pytest.skip("needs compiled kernels")
    if not is_compiled:
        without_compiled_kernels(monkeypatch)
    folder = make_model(num_hidden_layers=1)
    load_model(
        folder, read_model_config(folder, dtype=dtype, quantization=quantization), device=CPU
    )
    lines = [text for text in caplog.messages if "quantization saves nothing here" in text]
    assert len(lines) == (message is not None)
    assert all(message in line for line in lines if message)


def test_integers_of_another_shape_than_the_config_asks_are_refused(
    make_stored: Callable[..., Stored],
) -> None:
    folder = make_stored(COMPRESSED, store_symmetric, False).folder
    name = "model.layers.0.self_attn.o_proj.weight_shape"
    change_tensors(folder, lambda tensors: tensors[name].copy_(torch.tensor([64, 63])))
    with pytest.raises(
        ModelError, match=r"o_proj: shape is \(64, 63\), the config asks \(64, 64\)"
    ):
        load(folder)


def test_weights_are_integers_on_their_way_to_the_kernels(
    make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lm_head is int8 in both, the embedding and norms stay as they are."""
    kernels, packed = select(CPU), []
    pack_linear = kernels.pack_linear

    def record(weight: torch.Tensor | QuantizedWeight, *args: Any, **kwargs: Any) -> Any:
        assert isinstance(weight, QuantizedWeight)
        packed.append((weight.bits, weight.group_size))
        return pack_linear(weight, *args, **kwargs)

    monkeypatch.setattr(kernels, "pack_linear", record)
    folder = make_model(num_hidden_layers=1)
    load_model(folder, read_model_config(folder, quantization="int4"), device=CPU)
    assert packed == [(8, 64)] + [(4, 32)] * 4
