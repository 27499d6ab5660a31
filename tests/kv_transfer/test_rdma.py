"""Which RDMA devices count."""

from pathlib import Path

import pytest

from pdserve_engine.kv_transfer.transport.rdma import has_rdma_device


@pytest.fixture(autouse=True)
def any_net_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where nobody has chosen devices."""
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)


def test_a_device_of_the_machine_counts_if_it_was_given_to_us(tmp_path: Path) -> None:
    devices, verbs = tmp_path / "devices", tmp_path / "verbs"
    assert not has_rdma_device(devices, verbs)
    (devices / "mlx5_0").mkdir(parents=True)
    verbs.mkdir()
    (verbs / "rdma_cm").touch()
    assert not has_rdma_device(devices, verbs)
    (verbs / "uverbs0").touch()
    assert has_rdma_device(devices, verbs)


@pytest.mark.parametrize(
    ("setting", "counts"),
    [
        ("all", True),
        ("", True),
        ("mlx5_0:1", True),
        ("eth0,mlx5_*", True),
        ("^eth0", True),
        ("lo", False),
        ("eth0,mlx5_1:1", False),
    ],
)
def test_a_device_that_ucx_is_kept_from_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, counts: bool
) -> None:
    devices, verbs = tmp_path / "devices", tmp_path / "verbs"
    (devices / "mlx5_0").mkdir(parents=True)
    verbs.mkdir()
    (verbs / "uverbs0").touch()
    monkeypatch.setenv("UCX_NET_DEVICES", setting)
    assert has_rdma_device(devices, verbs) == counts
