"""One rank's process: a UniprocExecutor behind a MultiprocExecutor's socket.

This thread reads. Steps run on the executor's own, and calls that take their time on a thread that
ends with them: OpenMP keeps a team for every thread that has used one.
"""

import logging
import os
import select
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from pdserve_common.logging import setup_logging
from pdserve_engine.core.executor import ExecutedStep
from pdserve_engine.executor import messages
from pdserve_engine.executor.groups import join_group
from pdserve_engine.executor.messages import Message
from pdserve_engine.executor.rank_adapters import AdapterHost
from pdserve_engine.executor.rank_transport import TransportHost
from pdserve_engine.executor.uniproc import UniprocExecutor
from pdserve_engine.frames import Answer
from pdserve_engine.grammar.native import CompiledGrammar, TokenizerInfo
from pdserve_engine.models.stage import Stage
from pdserve_engine.request.sched_output import SchedulerOutput
from pdserve_engine.runner.model_source import ModelSource
from pdserve_engine.runner.plugins import load_general_plugins
from pdserve_engine.runner.rank import Rank

logger = logging.getLogger(__name__)

EXIT_LOST = 3
RECEIVE_BYTES = 1 << 20
# How often the transport is looked at.
CHECK_S = 0.5


def serve(connection: socket.socket) -> int:
    """Serve until the engine says that it is over, and return 0. Ends the process at once when the
    other end is gone.
    """
    server = _RankServer(connection)
    reader = messages.make_codec(server.read_grammar).reader()
    while True:
        if not select.select([connection], [], [], CHECK_S)[0]:
            server.check()
            continue
        data = connection.recv(RECEIVE_BYTES)
        if not data:
            logger.error("no connection to the engine any more")
            os._exit(EXIT_LOST)
        for message, number in reader.feed(data):
            if isinstance(message, messages.CloseRank):
                server.answer(number, server.close)
                return 0
            server.handle(message, number)
        server.check()


class _RankServer:
    _executor: UniprocExecutor
    # If it serves adapters.
    _adapters: AdapterHost
    _source: ModelSource
    _tokenizer_info: TokenizerInfo | None = None
    _transport: TransportHost | None = None

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._codec = messages.make_codec(self.read_grammar)
        self._send_lock = threading.Lock()
        self._perform: dict[type, Callable[[Any], object]] = {
            messages.LoadRank: self._load,
            messages.DetermineNumBlocks: lambda call: self._executor.determine_num_blocks(),
            messages.MakePool: self._make_pool,
            messages.SleepRank: lambda call: self._executor.sleep(
                call.level, keeps_pool=call.keeps_pool
            ),
            messages.RestoreWeights: lambda call: self._executor.restore_weights(),
            messages.RestoreKVCache: lambda call: self._executor.restore_kv_cache(),
            messages.StartProfile: lambda call: self._executor.start_profile().result(),
            messages.StopProfile: lambda call: self._executor.stop_profile().result(),
            messages.ReadAdapter: lambda call: self._adapters.read(call),
            messages.BlockChecksums: lambda call: self._executor.block_checksums(call.block_ids),
            messages.OpenTransport: self._open_transport,
            messages.CloseTransport: self._close_transport,
            messages.StopRank: lambda call: self._executor.stop(),
        }

    def read_grammar(self, text: str, first_mask_s: float) -> CompiledGrammar:
        """Return the grammar of a text that the engine has made of one."""
        if self._tokenizer_info is None:
            self._tokenizer_info = self._source.tokenizer_info()
        return CompiledGrammar.deserialize(text, self._tokenizer_info, first_mask_s)

    def handle(self, message: Message, number: int) -> None:
        """Begin to do what a message asks for."""
        if isinstance(message, SchedulerOutput):
            step = self._executor.submit(message)
            step.add_done_callback(lambda future: self._answer_step(number, future))
        elif isinstance(message, messages.TransportCommand):
            assert self._transport is not None, message
            self._transport.handle(message)
        elif isinstance(message, messages.AdapterCommand):
            self._adapters.handle(message)
        elif isinstance(message, messages.Poison):
            self._executor.poison(message.block_ids)
        elif isinstance(message, messages.Recover):
            self._executor.recover()
        else:
            perform = self._perform[type(message)]
            threading.Thread(target=self.answer, args=(number, perform, message)).start()

    def answer(self, number: int, perform: Callable[..., object], *args: object) -> None:
        """Do what a call asks for, and send what comes of it."""
        try:
            answer: Message = Answer.of(perform(*args))
        except Exception as error:  # whoever waits gets it
            if not isinstance(error, ValueError | OSError):
                logger.exception("%s failed", args)
            answer = messages.Failed.of(error)
        self._send(answer, number)

    def check(self) -> None:
        """Look whether all is well; to be called often."""
        if self._transport is not None:
            self._transport.check()

    def close(self) -> None:
        """See Executor.close."""
        self._executor.close()

    def _answer_step(self, number: int, step: "Future[ExecutedStep]") -> None:
        error = step.exception()
        if error is None:
            self._send(step.result(), number)
        else:
            logger.error("a step failed", exc_info=error)
            self._send(messages.Failed.of(RuntimeError(str(error))), number)

    def _send(self, message: Message, number: int) -> None:
        frame = self._codec.encode(message, number)
        with self._send_lock:
            self._connection.sendall(frame)

    def _make_pool(self, call: messages.MakePool) -> None:
        self._executor.make_pool(call.num_blocks, max_model_len=call.max_model_len)
        if self._executor.adapters is not None:
            self._adapters = AdapterHost(self._executor.adapters)

    def _open_transport(self, call: messages.OpenTransport) -> object:
        (transport,) = self._executor.open_transports(call.identity)
        self._transport = TransportHost(transport, lambda event: self._send(event, 0))
        return transport.endpoint()

    def _close_transport(self, call: messages.CloseTransport) -> None:
        if self._transport is not None:
            self._transport.close()

    def _load(self, call: messages.LoadRank) -> object:
        place = call.place
        setup_logging(call.log_level, f"{call.name}.{place.rank}")
        load_general_plugins()
        stage = Stage(
            place.stage, place.num_stages, join_group(place.before), join_group(place.after)
        )
        self._source = ModelSource(
            call.config, place.rank, join_group(place.tensor_parallel), stage
        )
        self._executor = UniprocExecutor(
            Rank(call.config, self._source, name=f"{call.name}-{place.rank}"),
            async_scheduling=True,
        )
        return self._executor.load()
