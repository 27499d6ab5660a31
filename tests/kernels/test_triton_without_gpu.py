"""What can be known of the Triton kernels without a GPU: their results, that they compile, and what
they take of a multiprocessor.
"""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from _pytest.mark.structures import ParameterSet

from support.samples import sampled
from support.triton_kernels import triton_kernels

triton = pytest.importorskip("triton")

# Registers, shared memory and spills by kernel and architecture, of the version of Triton in it.
# UPDATE_TRITON_RESOURCES=1 writes it anew.
TABLE = Path(__file__).with_name("triton_resources.json")
IS_UPDATE = os.environ.get("UPDATE_TRITON_RESOURCES") == "1"
# What is compiled for sm_80 is so for sm_86 and, but for FP8, sm_89. sm_120 has a TMA.
ARCHITECTURES = (80, 90)
# Bytes that a program may have on the smallest GPU that runs this code: an A100 would have 163 KiB.
SHARED_MEMORY = {80: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 120: 99 * 1024}
TORCH_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# Constants by which a kernel does other things, and not other sizes.
PATHS = ("USE_TMA", "IS_DECODE", "IS_SPLIT", "BITS", "NUM_SHARED")
INT64_POINTERS = {
    *("slot_mapping_ptr", "positions_ptr", "seeds_ptr"),
    *("highest_ptr", "records_ptr"),
    *("best_ptr", "nans_ptr", "chosen_ptr", "addresses_ptr", "order_ptr"),
    *("rows_ptr", "token_ids_ptr"),
}
INT32_POINTERS = {
    *("block_table_ptr", "seq_lens_ptr", "query_start_loc_ptr", "mask_ptr", "top_k_ptr"),
    *("tables_ptr", "table_size_ptr", "spread_ptr", "rows_ptr", "slots_ptr"),
    *("ids_ptr", "first_pairs_ptr", "first_blocks_ptr"),
}
FP32_POINTERS = {
    *("cos_sin_ptr", "divisors_ptr", "log_min_p_ptr", "thresholds_ptr", "values_ptr"),
    *("parts_ptr", "shared_parts_ptr", "part_sums_ptr", "shrunk_ptr", "sums_ptr", "weights_ptr"),
    *("penalized_ptr", "repetition_ptr", "reductions_ptr", "raw_ptr", "found_ptr"),
}
FP32_NUMBERS = ("eps", "scale_log2", "value_scale")
# Multiples of 16 for all models that are served fast.
EVEN_STRIDES = ("stride_query", "stride_output", "stride_token", "stride_block", "stride_head")


def test_a_process_may_ask_for_rows_that_do_not_depend_on_their_batch() -> None:
    from pdserve_kernels import name_of, select, use_on_cuda

    for name in ("triton.deterministic", "triton"):
        use_on_cuda(name)
        kernels = select(torch.device("cuda"))
        assert name_of(kernels) == name
        is_wanted = name == "triton.deterministic"
        assert kernels.is_row_independent(torch.bfloat16) is is_wanted
        assert kernels.is_shard_independent(torch.bfloat16) is is_wanted


class Case(NamedTuple):
    """A kernel as serving launches it."""

    name: str
    kernel: Any
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    options: dict[str, Any] = {}  # noqa: RUF012 - nobody changes it
    architectures: tuple[int, ...] = ARCHITECTURES
    kv_dtype: str = "bf16"
    dtype: str = "bf16"

    def compile(self, architecture: int) -> Any:
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        names = self.kernel.arg_names
        signature = {name: self.type_of(name) for name in names}
        is_even = {
            param.num
            for param in self.kernel.params
            if (signature[param.name] != "constexpr" and param.name.startswith(EVEN_STRIDES))
            or (signature[param.name].startswith("*") and not param.do_not_specialize_on_alignment)
        }
        source = ASTSource(
            self.kernel,
            signature,
            constexprs=self.constants,
            attrs={(index,): [["tt.divisibility", 16]] for index in is_even},
        )
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        options |= {"enable_fp_fusion": True} | self.options
        return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)

    def type_of(self, name: str) -> str:
        """Type an argument as serving passes it: int32 indices, int64 slots, and tensors."""
        constants, kv_dtype = self.constants, self.kv_dtype
        if name == "kv_rows" and constants["USE_TMA"]:
            return f"tensordesc<{kv_dtype}[{constants['BLOCK_N']}, {constants['HEAD_DIM']}]>"
        if name in constants or name == "kv_rows":
            return "constexpr"
        if name in INT64_POINTERS:
            return "*i64"
        if name in INT32_POINTERS:
            return "*i32"
        if name == "top_p_ptr":
            return "*fp64"
        if name in FP32_POINTERS:
            return "*fp32"
        if name == "integers_ptr":
            return "*u8" if constants["BITS"] == 4 else "*i8"
        if name == "zeros_ptr":
            return "*i8"
        if name in ("gate_up_ptr", "down_ptr") and constants["BITS"] < 16:
            return "*u8" if constants["BITS"] == 4 or constants["IS_FP8"] else "*i8"
        if name == "fp8_ptr":
            return "*fp8e4nv"
        if name == "scales_ptr":
            return f"*{self.dtype}" if constants.get("BITS") == 4 else "*fp32"
        if name == "kv_cache_ptr":
            return f"*{kv_dtype}"
        if name.endswith("_ptr"):
            return f"*{self.dtype}"
        return "fp32" if name in FP32_NUMBERS or name.endswith("_scale") else "i32"


def suffix_of(dtype: str) -> str:
    return "" if dtype == "bf16" else f", {dtype}"


def attention_cases(
    head_dim: int, *, window: int, softcap: float, dtype: str = "bf16", kv_dtype: str | None = None
) -> list[Case]:
    from pdserve_kernels.triton import attention, attention_tiles

    common = {"WINDOW": window, "SOFTCAP": softcap, "GROUP_SIZE": 4, "BLOCK_SIZE": 64}
    common |= {"HEAD_DIM": head_dim, "BLOCK_D": head_dim}
    decodes = attention_tiles.decode_tile(TORCH_DTYPES[dtype], head_dim, 4)
    architectures = ARCHITECTURES if kv_dtype is None else (90,)
    suffix = suffix_of(dtype) if kv_dtype is None else ", FP8"
    cases = []
    for name, tile, is_split in (
        ("decodes", decodes, False),
        ("decodes, split", decodes, True),
        ("chunks", chunk_tile(head_dim, dtype, has_tma=False), False),
        ("chunks, TMA", chunk_tile(head_dim, dtype, has_tma=True), False),
    ):
        if name == "chunks, TMA" and not tile.use_tma:
            continue
        constants = common | {
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "USE_TMA": tile.use_tma,
            "IS_DECODE": name.startswith("decodes"),
            "IS_SPLIT": is_split,
        }
        if not tile.use_tma:
            constants["kv_rows"] = None
        cases.append(
            Case(
                f"attention {head_dim}, {name}{suffix}",
                attention.attention_kernel,
                constants,
                tile.num_warps,
                tile.num_stages,
                architectures=(90, 120) if tile.use_tma and kv_dtype is None else architectures,
                kv_dtype=kv_dtype or dtype,
                dtype=dtype,
            )
        )
    if suffix:
        return cases
    merge = {"HEAD_DIM": head_dim, "BLOCK_D": head_dim, "WINDOW": window, "NUM_SPLITS": 128}
    merge["BLOCK_N"] = decodes.block_n
    return [*cases, Case(f"attention {head_dim}, merge", attention.merge_kernel, merge, 2)]


def chunk_tile(head_dim: int, dtype: str, *, has_tma: bool) -> Any:
    from pdserve_kernels.triton import attention_tiles

    return attention_tiles.chunk_tile(TORCH_DTYPES[dtype], 64, head_dim, 4, has_tma=has_tma)


def deterministic_cases() -> list[Case]:
    """Of heads of 128, and a down projection."""
    from pdserve_kernels.triton.deterministic import split_attention, tree_linear

    exact = {"enable_fp_fusion": False}
    tile = chunk_tile(128, "bf16", has_tma=False)
    common = {"WINDOW": 0, "GROUP_SIZE": 4, "HEAD_DIM": 128, "BLOCK_D": 128}
    common["SPLIT"] = split_attention.SPLIT
    blocks = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_SIZE": 64, "SOFTCAP": 0.0}
    cases = [
        Case(
            f"deterministic attention, {'decodes' if is_decode else 'chunks'}",
            split_attention.split_attention_kernel,
            common | blocks | {"IS_DECODE": is_decode},
            tile.num_warps,
            tile.num_stages,
            exact,
        )
        for is_decode in (False, True)
    ]
    merge = common | {"BLOCK_HEADS": 4}
    cases.append(
        Case(
            "deterministic attention, merge",
            split_attention.merge_parts_kernel,
            merge,
            2,
            options=exact,
        )
    )
    product = {"NUM_INPUTS": 14_336, "HAS_BIAS": True, "BLOCK_K": 64}
    product |= {"BLOCK_ROWS": tree_linear.BLOCK_ROWS, "BLOCK_OUT": tree_linear.BLOCK_OUT}
    product["GROUP_BLOCKS"] = tree_linear.GROUP_BLOCKS
    cases += [
        Case(
            f"deterministic linear, {num_sums} sums",
            tree_linear.tree_linear_kernel,
            product | {"NUM_SUMS": num_sums},
            tree_linear.NUM_WARPS,
            options=exact,
        )
        for num_sums in (1, 8)
    ]
    return cases


def layer_cases() -> list[Case]:
    from pdserve_kernels.triton import cache, heads, inputs, layers

    half = {"HALF": 64, "BLOCK_HALF": 64}
    heads_constants = {"NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HEAD_DIM": 128, "BLOCK_REST": 1}
    heads_constants |= {"BLOCK_SIZE": 64, "BLOCK_HEADS": heads.BLOCK_HEADS} | half
    kv = {"HEAD_DIM": 128, "BLOCK_D": 128, "BLOCK_SIZE": 64}
    heads_constants, kv = (constants | {"IS_FP8": False} for constants in (heads_constants, kv))
    fp8: dict[str, Any] = {"architectures": (90,), "kv_dtype": "fp8e4nv"}
    norm = {"HIDDEN": 4096, "BLOCK": 4096}
    return [
        Case("cache", cache.reshape_and_cache_kernel, kv),
        Case("cache, FP8", cache.reshape_and_cache_kernel, kv | {"IS_FP8": True}, **fp8),
        Case("rotary", layers.rotary_kernel, {"NUM_HEADS": 32} | half),
        Case("heads", heads.heads_kernel, heads_constants | {"HAS_NORM": False}),
        Case("heads, norms", heads.heads_kernel, heads_constants | {"HAS_NORM": True}),
        Case(
            "heads, norms, FP8",
            heads.heads_kernel,
            heads_constants | {"HAS_NORM": True, "IS_FP8": True},
            **fp8,
        ),
        Case("norm", layers.rms_norm_kernel, norm | {"ADD_RESIDUAL": False}),
        Case("norm, add", layers.rms_norm_kernel, norm | {"ADD_RESIDUAL": True}),
        Case("silu and mul", layers.silu_and_mul_kernel, {"BLOCK": layers.SILU_BLOCK}),
        Case("block tables", inputs.spread_kernel, {"BLOCK": inputs.BLOCK}),
    ]


def lora_cases() -> list[Case]:
    """Of a gate and an up projection."""
    from pdserve_kernels.triton.linears import lora

    blocks = {"TILE_ROWS": lora.TILE_ROWS, "BLOCK_RANKS": lora.BLOCK_RANKS}
    shrink = blocks | {"NUM_INPUTS": 4096, "PART_INPUTS": 512, "BLOCK_K": lora.BLOCK_K}
    expand = blocks | {"NUM_OUTPUTS": 28_672, "NUM_PARTS": 8, "BLOCK_OUT": lora.BLOCK_OUT}
    return [
        Case("lora, shrink", lora.shrink_kernel, shrink),
        Case("lora, expand", lora.expand_kernel, expand),
    ]


def quantized_moe_cases(dtype: str = "bf16") -> list[Case]:
    """Of 128 experts, as `--quantization` has them, and as checkpoints may."""
    from pdserve_kernels.triton import moe

    common = {"NUM_EXPERTS": 128, "BLOCK_EXPERTS": 128}
    common |= {"BLOCK_K": 64 if dtype == "bf16" else 32}
    common |= {"BLOCK_ROWS": moe.BLOCK_ROWS, "BLOCK_OUT": moe.BLOCK_OUT}
    sizes = {
        "gate and up": (moe.gate_up_kernel, 8, {"TOP_K": 8}, 2048, 768),
        "down": (moe.down_kernel, 4, {}, 768, 2048),
    }
    cases = []
    for name, bits, group_size, has_zeros in (
        ("int8", 8, 2048, False),
        ("int4", 4, 32, False),
        ("int4, zeros", 4, 128, True),
        ("fp8", 8, 2048, False),
        ("fp8, blocks", 8, 128, False),
    ):
        is_fp8 = name.startswith("fp8")
        kind = {"BITS": bits, "IS_FP8": is_fp8, "HAS_ZEROS": has_zeros, "GROUP_SIZE": group_size}
        for part, (kernel, num_warps, others, num_inputs, num_outputs) in sizes.items():
            shape = {"NUM_INPUTS": num_inputs, "NUM_OUTPUTS": num_outputs}
            shape["NUM_GROUPS"] = max(1, num_inputs // group_size)
            cases.append(
                Case(
                    f"experts in {name}, {part}{suffix_of(dtype)}",
                    kernel,
                    common | kind | others | shape,
                    num_warps,
                    architectures=(89, 90) if is_fp8 else ARCHITECTURES,
                    dtype=dtype,
                )
            )
    return cases


def moe_cases() -> list[Case]:
    """Of 128 experts, of which a token has 8, routers of 512, and of 60 with a shared expert."""
    from pdserve_kernels.triton import moe

    dense = {"NUM_GROUPS": 1, "GROUP_SIZE": 1, "BITS": 16, "IS_FP8": False, "HAS_ZEROS": False}
    of_experts = dense | {"NUM_EXPERTS": 128, "BLOCK_EXPERTS": 128, "BLOCK_K": 64}
    blocks = {"BLOCK_ROWS": moe.BLOCK_ROWS, "BLOCK_OUT": moe.BLOCK_OUT}
    route = {"TOP_K": 8, "RENORMALIZE": True, "NUM_INPUTS": 2048}
    gate_up = blocks | {"TOP_K": 8, "NUM_INPUTS": 2048, "NUM_OUTPUTS": 768}
    down = blocks | {"NUM_INPUTS": 768, "NUM_OUTPUTS": 2048}
    total = {"TOP_K": 8, "BLOCK": moe.SUM_BLOCK, "NUM_SHARED": 0}
    one = dense | {"NUM_EXPERTS": 1, "BLOCK_EXPERTS": 1, "BLOCK_K": 64}
    routes = []
    for count, num_shared in ((128, 0), (512, 0), (60, 1)):
        tile = moe.route_tile(count + num_shared, torch.bfloat16)
        del tile["num_stages"]
        constants = route | tile | {"NUM_EXPERTS": count, "NUM_SHARED": num_shared}
        name = f"experts, route of {count}" + ", shared" * num_shared
        routes.append(Case(name, moe.route_kernel, constants, moe.ROUTE_WARPS))
    return [
        *routes,
        *quantized_moe_cases(),
        Case("experts, gate and up", moe.gate_up_kernel, of_experts | gate_up, num_warps=8),
        Case("experts, down", moe.down_kernel, of_experts | down),
        Case("experts, sum", moe.sum_experts_kernel, total),
        Case("shared expert, gate and up", moe.gate_up_kernel, gate_up | one | {"TOP_K": 1}, 8),
        Case("shared expert, down", moe.down_kernel, down | one),
        Case("shared expert, sum", moe.sum_experts_kernel, total | {"NUM_SHARED": 1}),
    ]


def integer_cases(dtype: str = "bf16") -> list[Case]:
    """Of an 8B model's down projection; as `--quantization` has them, and with zeros as AWQ has."""
    from pdserve_kernels.triton import split_sums
    from pdserve_kernels.triton.linears import linear_int

    common = {"NUM_INPUTS": 14_336, "BLOCK_K": linear_int.BLOCK_K}
    blocks = {"SPLIT_K": linear_int.SPLIT_K, "BLOCK_OUT": linear_int.BLOCK_OUT}
    num_stages = linear_int.num_stages(TORCH_DTYPES[dtype])
    cases = []
    for name, bits, group_size, has_zeros in (
        ("int8", 8, 14_336, False),
        ("int4", 4, 32, False),
        ("int4, zeros", 4, 128, True),
    ):
        kind = {"BITS": bits, "GROUP_SIZE": group_size, "HAS_ZEROS": has_zeros}
        kind |= common | {"NUM_GROUPS": 14_336 // group_size}
        for rows in (16, 64):
            case = Case(
                f"linear {name}, {rows} rows{suffix_of(dtype)}",
                linear_int.linear_int_kernel,
                kind | blocks | {"BLOCK_ROWS": rows},
                num_stages=num_stages,
                dtype=dtype,
            )
            cases.append(case)
        dense = kind | {"BLOCK_OUT": linear_int.BLOCK_DENSE}
        cases.append(Case(f"dequantize {name}", linear_int.dequantize_kernel, dense))
    total = {"NUM_SPLITS": 14, "HAS_BIAS": True, "BLOCK": split_sums.BLOCK}
    return [*cases, Case("linear, sum", split_sums.sum_kernel, total)]


def fp8_cases(dtype: str = "bf16") -> list[Case]:
    """Of an 8B model's down projection: a scale for each output, or for blocks of 128 by 128."""
    from pdserve_kernels.triton.linears import linear_fp8

    cases = []
    for name, group_size in (("", 14_336), (", blocks", 128)):
        kind = {"NUM_INPUTS": 14_336, "NUM_GROUPS": 14_336 // group_size, "GROUP_SIZE": group_size}
        kind["BLOCK_K"] = linear_fp8.BLOCK_K
        for rows in (16, 64, 2048):
            tile = linear_fp8.tile_for(rows, TORCH_DTYPES[dtype])
            blocks = {"BLOCK_ROWS": tile.block_rows, "BLOCK_OUT": tile.block_out}
            case = Case(
                f"linear fp8{name}, {rows} rows{suffix_of(dtype)}",
                linear_fp8.linear_fp8_kernel,
                kind | blocks | {"SPLIT_K": 14_336, "HAS_BIAS": True},
                tile.num_warps,
                tile.num_stages,
                architectures=(89, 90),
                dtype=dtype,
            )
            cases.append(case)
        dense = kind | {"BLOCK_OUT": linear_fp8.BLOCK_DENSE}
        cases.append(
            Case(
                f"dequantize fp8{name}",
                linear_fp8.dequantize_fp8_kernel,
                dense,
                architectures=(90,),
            )
        )
    return cases


def fp32_cases() -> list[Case]:
    """What takes the most shared memory: tiles of activations have twice the bytes. For the GPUs
    that have the least of it.
    """
    cases = [*integer_cases("fp32"), *fp8_cases("fp32"), *quantized_moe_cases("fp32")]
    cases += attention_cases(128, window=0, softcap=0.0, dtype="fp32")[:1]
    cases += attention_cases(256, window=0, softcap=0.0, dtype="fp32")[2:]
    return [
        case._replace(architectures=case.architectures[:1])
        for case in cases
        if case.dtype == "fp32"
    ]


def sampling_cases() -> list[Case]:
    """What chooses tokens."""
    from pdserve_kernels.triton.sampling import filters, logprobs, penalties
    from pdserve_kernels.triton.sampling import sample as sampling

    exact = {"enable_fp_fusion": False}
    search = {"SEARCH_BLOCK": filters.SEARCH_BLOCK}
    cases = [
        Case(
            "highest logit",
            logprobs.highest_logit_kernel,
            {"BLOCK": logprobs.BLOCK},
            options=exact,
        ),
        Case("logprobs", logprobs.terms_kernel, {"BLOCK": logprobs.BLOCK}, options=exact),
        Case("penalize", penalties.penalize_kernel, {"BLOCK": penalties.BLOCK}, options=exact),
        Case("choose", sampling.choose_kernel, {"BLOCK": 256, "HAS_VALUES": True}, options=exact),
    ]
    for has_mask in (False, True):
        masked = ", mask" if has_mask else ""
        constants = {"BLOCK": 1024, "HAS_MASK": has_mask}
        for kernel in (filters.highest_kernel, sampling.argmax_kernel):
            name = kernel.__name__.removesuffix("_kernel")
            cases.append(Case(name + masked, kernel, constants, options=exact))
        draw = constants | {"IS_FILTERED": has_mask}
        cases.append(Case("draw" + masked, sampling.draw_kernel, draw, options=exact))
        for by_weight, unit in ((False, "number"), (True, "weight")):
            steps = constants | {"BY_WEIGHT": by_weight}
            rest = steps | search
            what = f" by {unit}{masked}"
            cases += [
                Case("steps" + what, filters.steps_kernel, steps, 8, options=exact),
                Case("pivots" + what, filters.pivots_kernel, rest, 8, options=exact),
                Case("gather" + what, filters.gather_kernel, rest, options=exact),
            ]
    for by_weight, unit in ((False, "number"), (True, "weight")):
        constants = search | {"BY_WEIGHT": by_weight}
        cases.append(Case(f"search by {unit}", filters.search_kernel, constants, 16, options=exact))
    return cases


def all_cases() -> list[Case]:
    return [
        *attention_cases(128, window=0, softcap=0.0),
        *attention_cases(128, window=0, softcap=0.0, kv_dtype="fp8e4nv"),
        *attention_cases(256, window=4096, softcap=50.0),
        *layer_cases(),
        *lora_cases(),
        *moe_cases(),
        *integer_cases(),
        *fp8_cases(),
        *fp32_cases(),
        *sampling_cases(),
        *deterministic_cases(),
    ]


def test_every_kernel_has_a_case() -> None:
    kernels = {kernel for _, kernel in triton_kernels()}
    assert {case.kernel for case in all_cases()} == kernels


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted")
@pytest.mark.parametrize("architecture", sampled(ARCHITECTURES, 90))
def test_decodes_and_chunks_are_multiplied_and_reduced_alike(
    architecture, tmp_path, monkeypatch
) -> None:
    """By the same instructions, from the same layouts: the order of sums rests on them."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    chunks, decodes, *_ = deterministic_cases()
    found = []
    for case in (chunks, decodes):
        compiled = case.compile(architecture)
        products = re.findall(r"wgmma\.mma_async\S+|mma\.sync\S+", compiled.asm["ptx"])
        layouts = re.findall(r"#ttg\.nvidia_mma<.*>", compiled.asm["ttgir"])
        found.append((set(products), set(layouts), set(re.findall(r"ex2\S+", compiled.asm["ptx"]))))
        assert products
        assert layouts
    assert found[0] == found[1]


def sampled_cases() -> list[ParameterSet]:
    """All cases for all their architectures; `make test` has the first one of each path through a
    kernel, in each dtype, on the newest, and of each kernel on each.
    """
    parameters, seen = [], set()
    for case in all_cases():
        path = (case.dtype, case.kv_dtype, *(case.constants.get(name) for name in PATHS))
        for architecture in case.architectures:
            kinds = {(case.kernel, architecture)}
            if architecture == case.architectures[-1]:
                kinds.add((case.kernel, path))
            is_first = not kinds <= seen
            seen |= kinds
            parameters.append(
                pytest.param(
                    case,
                    architecture,
                    id=f"{case.name}-{architecture}",
                    marks=() if is_first else pytest.mark.soak,
                )
            )
    return parameters


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted")
@pytest.mark.parametrize(("case", "architecture"), sampled_cases())
def test_kernels_take_what_the_table_says(case, architecture, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiled = case.compile(architecture)
    assert compiled.metadata.shared <= SHARED_MEMORY[architecture]
    if case.options:  # rounds each step by itself
        assert "fma.rn.f" not in compiled.asm["ptx"]
    table = json.loads(TABLE.read_text())
    taken = resources(compiled, tmp_path / "kernel.cubin")
    place = table["kernels"].setdefault(f"sm_{architecture}", {})
    if IS_UPDATE:
        table["triton"] = triton.__version__
        place[case.name] = taken
        TABLE.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    expected = place[case.name]
    assert (taken["spilled bytes"] > 0) == (expected["spilled bytes"] > 0)
    if table["triton"] == triton.__version__:
        assert taken == expected


def resources(compiled: Any, cubin: Path) -> dict[str, int]:
    """Return what a thread and a program take."""
    cubin.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    usage = subprocess.run(
        [tool, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True
    ).stdout
    registers, stack, local = (
        int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK", "LOCAL")
    )
    return {
        "registers": registers,
        "spilled bytes": stack + local,
        "shared bytes": compiled.metadata.shared,
    }
