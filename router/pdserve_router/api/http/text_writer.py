"""The way of a stream's plain text to its connection, without its task."""

from functools import partial

from starlette.types import Scope

from pdserve_common.observability import defects
from pdserve_router.api.http.connections import connection_of
from pdserve_router.api.http.write_queue import WriteQueue
from pdserve_router.api.openai.answer import AnswerFormat
from pdserve_router.requests.live_request import LiveRequest
from pdserve_router.requests.output.outputs import RequestOutputCollector


class TextWriter:
    """Writes the text of one completion as server-sent events while the task of its stream sleeps:
    waking that for each token took 15 us. Whatever is not plain text wakes it, and so does a
    connection that takes nothing more for now: then the task waits for it, under its stall guard.
    """

    def __init__(
        self,
        live: LiveRequest,
        form: AnswerFormat,
        scope: Scope,
        queue: WriteQueue,
    ) -> None:
        self._live = live
        self._form = form
        self._connection = connection_of(scope)
        self._queue = queue

    def start(self) -> None:
        """From now on text goes this way."""
        if (collector := self._live.collector) is not None:
            collector.on_text = partial(self._queue.add, partial(self._write, collector))

    def _write(self, collector: RequestOutputCollector) -> None:
        is_free = collector.is_awaited and not self._connection.is_write_paused
        if not is_free or (new := collector.take_text()) is None:
            collector.wake()
            return
        try:
            if data := self._form.text_event(*new):
                self._connection.write_chunk(data)
        except Exception as error:
            # A defect, which must not end others' streams: the task ends this one.
            defects.record("requests", error, "one answer")
            self._live.on_defect()
