"""The network side of a worker process: which settings are refused."""

import pytest

from pdserve_worker.config import WorkerConfig


@pytest.mark.parametrize(
    ("engine_id", "message"),
    [
        ("", "engine_id has 0 characters, must be 1 to 256"),
        ("x" * 257, "engine_id has 257 characters, must be 1 to 256"),
        ("näme", "engine_id must be printable ASCII"),
        ("a\nb", "engine_id must be printable ASCII"),
    ],
)
def test_an_engine_id_has_to_fit_into_headers(engine_id: str, message: str) -> None:
    WorkerConfig(engine_id="decode-0.decode:50061")
    with pytest.raises(ValueError, match=message):
        WorkerConfig(engine_id=engine_id)
