"""What a line of a log says, and whose request it is about."""

import io
import json
import logging
import sys
from collections.abc import Iterator

import pytest

from pdserve_common.observability.logging import (
    log_request,
    make_formatter,
    request_id_var,
    setup_logging,
)

logger = logging.getLogger("pdserve_test")


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    # As `force` does: these go on after the test.
    for handler in handlers:
        root.removeHandler(handler)
    setup_logging("info", "prefill-0")
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_line_about_a_request_has_its_id_whoever_writes_it(lines: io.StringIO) -> None:
    token = request_id_var.set("mine")
    try:
        logger.info("about mine")
        log_request(logger, logging.WARNING, "another", 2, "lost %s", "p0")
    finally:
        request_id_var.reset(token)
    mine, another = (json.loads(line) for line in lines.getvalue().splitlines())
    assert mine["request_id"] == "mine"
    assert another["request_id"] == "another"
    assert another["msg"] == "request another, attempt 2: lost p0"
    assert (another["level"], another["worker_id"]) == ("WARNING", "prefill-0")


def test_the_values_of_a_mapping_are_fields(lines: io.StringIO) -> None:
    logger.info("%(num_left)d are left of %(name)s", {"num_left": 3, "name": "a\nb", "more": None})
    (entry,) = map(json.loads, lines.getvalue().splitlines())
    assert entry["msg"] == "3 are left of a\nb"
    assert (entry["num_left"], entry["name"], entry["more"]) == (3, "a\nb", None)


def test_a_message_is_one_line_of_a_terminal() -> None:
    record = logging.makeLogRecord({"msg": "a\r\nb\x1b[31m\x9b\u2028é", "worker_id": "p"})
    text = make_formatter(is_json=False).format(record)
    assert text.endswith(": a\\r\\nb\\x1b[31m\\x9b\\u2028é")
