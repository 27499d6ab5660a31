"""numerics_id tells workers apart that may compute other bits."""

import types
from collections.abc import Callable, Iterator

import pytest
import torch

from pdserve_engine import numerics
from pdserve_engine.config import EngineConfig
from pdserve_engine.numerics import numerics_id

CPU = torch.device("cpu")


class Native:
    config = types.SimpleNamespace(dtype_name="float32")


class Transformers(Native):
    pass


def in_bfloat16() -> Native:
    model = Native()
    model.config = types.SimpleNamespace(dtype_name="bfloat16")
    return model


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
    assert len({id_of(), id_of(block_size=32), id_of(Transformers), id_of(in_bfloat16)}) == 4


def test_the_number_of_threads_changes_it() -> None:
    torch.set_num_threads(1)
    one = id_of()
    torch.set_num_threads(2)
    assert id_of() != one


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr(numerics, "VERSION", "0.0.0"),
        lambda patch: patch.setattr(torch, "__version__", "2.0.0"),
        lambda patch: patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2"),
        lambda patch: patch.setattr(numerics, "_processor", lambda: ("another",)),
    ],
    ids=["our version", "torch's version", "instruction set", "processor"],
)
def test_build_and_machine_change_it(
    change: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = id_of()
    change(monkeypatch)
    assert id_of() != before
