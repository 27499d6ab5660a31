"""A decode worker that repeats P's first token wrongly."""

import dataclasses
import threading

from pdserve_common.types.kv import PrefillDone
from pdserve_engine.kv_transfer.connectors.consumer import ConsumerConnector
from pdserve_engine.kv_transfer.protocol.pull import Pull


class Liar:
    """How many of the next first tokens are to be wrong."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0

    def lie(self, count: int) -> None:
        """Let the next `count` first tokens be others."""
        with self._lock:
            self._count += count

    def reset(self) -> None:
        """Be honest."""
        with self._lock:
            self._count = 0

    def pass_on(self, message: PrefillDone) -> PrefillDone:
        """Return it, or a wrong one."""
        with self._lock:
            if not self._count or not message.output_token_ids:
                return message
            self._count -= 1
        first, *rest = message.output_token_ids
        # Another token of every vocabulary.
        wrong = 3 if first != 3 else 4
        return dataclasses.replace(message, output_token_ids=(wrong, *rest))


def install() -> Liar:
    """Wrap the production code; return what tells it when to lie."""
    liar, honest = Liar(), ConsumerConnector._on_prefill_done

    def on_prefill_done(self: ConsumerConnector, pull: Pull, message: PrefillDone) -> bool:
        return honest(self, pull, liar.pass_on(message))

    ConsumerConnector._on_prefill_done = on_prefill_done  # type: ignore[method-assign]
    return liar
