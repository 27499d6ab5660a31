"""What can be known of the Triton kernels without a GPU: their results and that they compile."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

triton = pytest.importorskip("triton")

CONSTANTS = {"GROUP_SIZE": 2, "BLOCK_SIZE": 16, "BLOCK_N": 64}


def test_every_triton_kernel_agrees_with_the_reference_in_the_interpreter():
    suite = Path(__file__).with_name("test_triton_kernels.py")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(suite)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert " passed" in result.stdout
    assert "skipped" not in result.stdout


def signature_of(kernel, constants):
    """Type every argument as serving passes it: bf16 tensors, int32 indices, int64 slots."""
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in ("slot_mapping_ptr", "positions_ptr"):
            signature[name] = "*i64"
        elif name in ("block_table_ptr", "seq_lens_ptr", "query_start_loc_ptr", "mask_ptr"):
            signature[name] = "*i32"
        elif name.startswith("tile_") or name == "cos_sin_ptr":
            signature[name] = "*fp32"
        elif name.endswith("_ptr"):
            signature[name] = "*bf16"
        elif name in ("eps", "scale_log2"):
            signature[name] = "fp32"
        else:
            signature[name] = "i64" if name.startswith(("stride_block", "stride_head")) else "i32"
    return signature


def all_kernels():
    from pdserve_kernels.triton import attention, cache, layers, masks

    modules = (attention, cache, layers, masks)
    values = [value for module in modules for value in vars(module).items()]
    return {name: value for name, value in values if name.endswith("_kernel")}


def attention_cases(kernels, constants, *, window, softcap):
    merge = {"HEAD_DIM": constants["HEAD_DIM"], "BLOCK_D": constants["BLOCK_D"], "WINDOW": window}
    constants = constants | {"WINDOW": window, "SOFTCAP": softcap}
    return [
        (kernels["_decode_kernel"], constants | {"BLOCK_M": 16}),
        (kernels["_prefill_kernel"], constants | {"BLOCK_M": 64}),
        (kernels["_merge_kernel"], merge),
    ]


def kernel_cases():
    kernels = all_kernels()
    # Smaller heads take less of everything.
    head = {"HEAD_DIM": 128, "BLOCK_D": 128}
    cases = [
        *attention_cases(kernels, CONSTANTS | head, window=0, softcap=0.0),
        (kernels["_reshape_and_cache_kernel"], head | {"BLOCK_SIZE": 16}),
        (kernels["_rotary_kernel"], {"NUM_HEADS": 16, "HALF": 64, "BLOCK_HALF": 64}),
    ]
    sliding = CONSTANTS | {"HEAD_DIM": 256, "BLOCK_D": 256}
    cases += attention_cases(kernels, sliding, window=4096, softcap=50.0)
    for add in (False, True):
        constants = {"HIDDEN": 1024, "BLOCK": 1024, "ADD_RESIDUAL": add}
        cases.append((kernels["_rms_norm_kernel"], constants))
    cases.append((kernels["_silu_and_mul_kernel"], {"BLOCK": 1024}))
    cases.append((kernels["_mask_kernel"], {"BLOCK": 1024}))
    assert {kernel for kernel, _ in cases} == set(kernels.values())
    return cases


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted")
@pytest.mark.parametrize(
    ("kernel", "constants"),
    [pytest.param(*case, id=f"{case[0].__name__}-{i}") for i, case in enumerate(kernel_cases())],
)
def test_every_triton_kernel_compiles_for_sm_90(kernel, constants, tmp_path, monkeypatch):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    source = ASTSource(kernel, signature_of(kernel, constants), constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert len(compiled.asm["cubin"]) > 0
    assert compiled.metadata.shared <= 227 * 1024
