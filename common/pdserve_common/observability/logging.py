"""Logging set up once per process: text on a terminal, JSON lines otherwise, request ids from a
context variable, or from `extra` where a line is about another request.

A line whose numbers are for machines too has them in a mapping: `logger.info("%(num)d left",
{"num": 3})` reads `3 left` everywhere, and its JSON has `"num": 3` besides.
"""

import contextvars
import json
import logging
import sys
import time
from collections.abc import Mapping

request_id_var: contextvars.ContextVar[str | None] = contextvars.ContextVar(
    "request_id", default=None
)

_STANDARD_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({})))


# `json.dumps` with an argument makes one for each call.
_ENCODER = json.JSONEncoder(default=str)


class _ContextFilter(logging.Filter):
    def __init__(self, worker_id: str) -> None:
        super().__init__()
        self._worker_id = worker_id

    def filter(self, record: logging.LogRecord) -> bool:
        record.worker_id = self._worker_id
        if not hasattr(record, "request_id"):
            record.request_id = request_id_var.get()
        return True


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "ts": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "msg": record.getMessage(),
        }
        for key, value in vars(record).items():
            if key not in _STANDARD_ATTRIBUTES and value is not None and key != "taskName":
                entry[key] = value
        if isinstance(record.args, Mapping):
            entry.update(record.args)
        if record.exc_info:
            entry["exc"] = self.formatException(record.exc_info)
        return _ENCODER.encode(entry)


# What would begin a line, or tell a terminal what to do.
_CONTROL_CHARACTERS = {
    code: chr(code).encode("unicode_escape").decode()
    for code in (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)
}


class _TextFormatter(logging.Formatter):
    """A message is one line, whatever is in it."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return super().formatMessage(record).translate(_CONTROL_CHARACTERS)


def make_formatter(*, is_json: bool) -> logging.Formatter:
    """Return what writes lines for machines, or for a terminal."""
    if is_json:
        return _JsonFormatter()
    return _TextFormatter("%(asctime)s %(levelname)-7s %(worker_id)s %(name)s: %(message)s")


def setup_logging(level: str, worker_id: str) -> None:
    """Configure the root logger. `worker_id` is on every line, so that mixed logs stay readable."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_ContextFilter(worker_id))
    handler.setFormatter(make_formatter(is_json=not sys.stderr.isatty()))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("asyncio").setLevel(logging.WARNING)


def log_request(
    logger: logging.Logger, level: int, request_id: str, attempt: int, text: str, *args: object
) -> None:
    """Log a line about a request in the form that it has in all services, so that the request's id
    finds the whole story.
    """
    text = f"request %s, attempt %d: {text}"
    logger.log(level, text, request_id, attempt, *args, extra={"request_id": request_id})
