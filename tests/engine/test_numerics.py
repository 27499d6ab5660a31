"""numerics_id tells workers apart that may compute other bits."""

import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from pdserve_engine.config import EngineConfig
from pdserve_engine.runner.load import numerics
from pdserve_engine.runner.load.numerics import numerics_id
from pdserve_kernels import name_of, select

CPU = torch.device("cpu")


class TransformersConfig(types.SimpleNamespace):
    pass


class Native:
    is_row_independent = True
    config_class = types.SimpleNamespace

    def __init__(self, dtype: torch.dtype = torch.float32, head_dim: int = 64) -> None:
        name = str(dtype).removeprefix("torch.")
        self.config = self.config_class(
            dtype=dtype, kv_dtype=dtype, dtype_name=name, head_dim=head_dim, vision=None
        )


class Seeing(Native):
    """With a vision tower, which is transformers'."""

    def __init__(self) -> None:
        super().__init__(torch.bfloat16)
        self.config.vision = "tower"


class Transformers(Native):
    is_row_independent = False
    config_class = TransformersConfig


def in_bfloat16() -> Native:
    return Native(torch.bfloat16)


def id_of(model: Callable[[], Native] = Native, **fields: object) -> str:
    return numerics_id(EngineConfig(**fields), model(), CPU)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _keep_threads() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


def test_it_is_the_same_for_workers_that_differ_in_what_no_bit_depends_on() -> None:
    assert id_of() == id_of(max_num_seqs=3, max_num_batched_tokens=99, num_blocks=7)
    assert len(id_of()) == 16
    int(id_of(), 16)


def test_kernels_dtype_and_code_change_it() -> None:
    models = (Native, Transformers, in_bfloat16, Seeing)
    assert len({id_of(block_size=32), *map(id_of, models)}) == 5


def ids_by_threads(model: Callable[[], Native], **fields: object) -> set[str]:
    ids = set()
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        ids.add(id_of(model, **fields))
    return ids


def test_the_number_of_threads_changes_it_where_bits_depend_on_it() -> None:
    assert len(ids_by_threads(Native)) == 2
    assert len(ids_by_threads(lambda: Transformers(torch.bfloat16))) == 2
    assert len(ids_by_threads(Seeing)) == 2
    # Without packed tiles attention is the reference's.
    assert len(ids_by_threads(in_bfloat16, block_size=8)) == 2


@pytest.mark.skipif(not name_of(select(CPU)).startswith("cpu/"), reason="needs compiled kernels")
def test_a_p_and_a_d_of_different_threads_agree_in_bf16() -> None:
    assert len(ids_by_threads(in_bfloat16)) == 1


def test_the_kernels_change_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = id_of(in_bfloat16)
    monkeypatch.setattr(numerics, "name_of", lambda _: "others")
    assert id_of(in_bfloat16) != before


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr(numerics, "VERSION", "0.0.0"),
        lambda patch: patch.setattr(torch, "__version__", "2.0.0"),
        lambda patch: patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another"),
    ],
    ids=["our version", "torch's version", "instruction set"],
)
def test_build_and_machine_change_it(
    change: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = id_of()
    change(monkeypatch)
    assert id_of() != before


CPUINFO = "processor\t: 0\nmodel name\t: One\nstepping\t: 4\nflags\t\t: fpu avx2 avx512f\n"


@pytest.mark.parametrize(
    ("text", "other", "is_same"),
    [
        ("One", "Another", False),
        ("stepping\t: 4", "stepping\t: 5", False),
        (" avx512f", "", False),
        # No matrix multiplication is chosen by it.
        (" fpu", "", True),
    ],
)
def test_the_processor_changes_it(tmp_path: Path, text: str, other: str, is_same: bool) -> None:
    ids = []
    for content in (CPUINFO, CPUINFO.replace(text, other)):
        file = tmp_path / "cpuinfo"
        file.write_text(content)
        ids.append(numerics_id(EngineConfig(), Native(), CPU, cpuinfo=file))  # type: ignore[arg-type]
    assert (ids[0] == ids[1]) is is_same


def test_a_vendor_s_attention_changes_it_by_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from pdserve_kernels import triton
    from pdserve_kernels.triton import flash_attn

    ids = set()
    for kernels, version in ((triton, ""), (flash_attn, "3.0.0"), (flash_attn, "3.0.1")):
        monkeypatch.setattr(numerics, "select", lambda device, kernels=kernels: kernels)
        monkeypatch.setattr(flash_attn, "vendor_version", lambda version=version: version)
        ids.add(id_of())
    assert len(ids) == 3
