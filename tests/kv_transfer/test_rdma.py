"""Which RDMA devices count."""

from pathlib import Path

from pdserve_engine.kv_transfer.rdma import has_rdma_device


def test_a_device_of_the_machine_counts_if_it_was_given_to_us(tmp_path: Path) -> None:
    devices, verbs = tmp_path / "devices", tmp_path / "verbs"
    assert not has_rdma_device(devices, verbs)
    (devices / "mlx5_0").mkdir(parents=True)
    verbs.mkdir()
    (verbs / "rdma_cm").touch()
    assert not has_rdma_device(devices, verbs)
    (verbs / "uverbs0").touch()
    assert has_rdma_device(devices, verbs)
