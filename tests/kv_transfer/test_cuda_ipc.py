"""What UCX is told to use for a pool on a GPU; the drivers are fakes."""

import ctypes
import os
from types import SimpleNamespace

import pytest
import torch

from pdserve_engine.kv_transfer.transport import cuda_ipc
from pdserve_engine.kv_transfer.transport.cuda_ipc import check_cuda_ipc
from pdserve_engine.kv_transfer.transport.factory import make_transport
from support.handoff import make_identity

GET_ZCOPY = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test sets in it is taken back."""
    for name in ("UCX_TLS", GET_ZCOPY):
        monkeypatch.setenv(name, "")
        del os.environ[name]


@pytest.mark.parametrize(
    ("required", "device", "names"),
    [
        ("any", "cpu", None),
        ("any", "cuda", None),
        ("shm", "cpu", "tcp,cma,self"),
        ("shm", "cuda", "tcp,cma,self,cuda_copy,cuda_ipc"),
        ("tcp", "cpu", "tcp,self"),
        ("tcp", "cuda", "tcp,self,cuda_copy"),
        ("rdma", "cpu", "rc,dc,ud,self"),
        ("rdma", "cuda", "rc,dc,ud,self,cuda_copy,gdr_copy"),
    ],
)
def test_ucx_may_use_what_is_required_and_copies_a_gpus_memory(
    required: str, device: str, names: str | None
) -> None:
    make_transport(make_identity("d0"), require_transport=required, device=device)
    assert os.environ.get("UCX_TLS") == names
    may_read_by_ipc = device == "cuda" and required in ("any", "shm")
    assert os.environ.get(GET_ZCOPY) == ("on" if may_read_by_ipc else None)


def test_what_the_environment_says_of_cuda_ipc_stays() -> None:
    os.environ[GET_ZCOPY] = "auto"
    make_transport(make_identity("d0"), device="cuda")
    assert os.environ[GET_ZCOPY] == "auto"


def set_driver(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Have a driver whose cuIpcGetMemHandle returns `code`."""

    def set_name(code: int, name: "ctypes._Pointer[ctypes.c_char_p]") -> None:
        name._obj.value = b"CUDA_ERROR_NOT_SUPPORTED"  # type: ignore[attr-defined]

    driver = SimpleNamespace(
        cuIpcGetMemHandle=lambda handle, address: code, cuGetErrorName=set_name
    )
    monkeypatch.setattr(cuda_ipc, "ctypes", SimpleNamespace(**vars(ctypes)))
    monkeypatch.setattr(cuda_ipc.ctypes, "CDLL", lambda name: driver)


def test_memory_that_others_can_open_is_left_to_ucx(monkeypatch: pytest.MonkeyPatch) -> None:
    set_driver(monkeypatch, 0)
    check_cuda_ipc(torch.zeros(1))
    assert "UCX_TLS" not in os.environ


def test_memory_that_nobody_can_open_goes_without_ipc(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    set_driver(monkeypatch, 801)
    check_cuda_ipc(torch.zeros(1))
    assert os.environ["UCX_TLS"] == "^cuda_ipc"
    assert "cuIpcGetMemHandle returns CUDA_ERROR_NOT_SUPPORTED" in caplog.text
    os.environ["UCX_TLS"] = "tcp,self,cuda_copy"
    check_cuda_ipc(torch.zeros(1))
    assert os.environ["UCX_TLS"] == "tcp,self,cuda_copy"


def test_memory_that_nobody_can_open_is_refused_where_it_must_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_driver(monkeypatch, 801)
    make_transport(make_identity("d0"), require_transport="shm", device="cuda")
    with pytest.raises(ValueError, match=r"no other process can open the KV pool.*NOT_SUPPORTED"):
        check_cuda_ipc(torch.zeros(1))
