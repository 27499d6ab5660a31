"""One rank's process: a UniprocExecutor behind a MultiprocExecutor's sockets.

Steps, and what comes behind them, have a socket of their own: the thread that reads it runs them.
The process's first thread reads all else. Calls that take their time run on a thread that ends with
them: OpenMP keeps a team for every thread that has used one.
"""

import contextlib
import logging
import os
import select
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import torch

from pdserve_common.observability.logging import setup_logging
from pdserve_common.processes.call_thread import CallerThread
from pdserve_common.processes.calls import Call, Failed, Handlers, answer
from pdserve_common.processes.connection import Connection
from pdserve_engine.core.executor import ExecutedStep
from pdserve_engine.executor import messages
from pdserve_engine.executor.build import this_build
from pdserve_engine.executor.gpus import use_gpu
from pdserve_engine.executor.groups import join_group
from pdserve_engine.executor.messages import Message
from pdserve_engine.executor.rank_adapters import AdapterHost
from pdserve_engine.executor.rank_transport import TransportHost
from pdserve_engine.executor.uniproc import UniprocExecutor
from pdserve_engine.grammar.native import CompiledGrammar, TokenizerInfo
from pdserve_engine.models.stage import Stage
from pdserve_engine.request.sched_output import SchedulerOutput
from pdserve_engine.runner.load.model_source import ModelSource
from pdserve_engine.runner.load.plugins import load_general_plugins
from pdserve_engine.runner.rank import Rank
from pdserve_engine.runner.rank_calls import RANK_CALLS

logger = logging.getLogger(__name__)

EXIT_LOST = 3
# How often the transport is looked at.
CHECK_S = 0.5


def serve(calls: socket.socket, steps: socket.socket) -> None:
    """Serve until the engine says that it is over: the process has to end then, which releases the
    pool. Ends it at once when the other end is gone.
    """
    server = _RankServer(calls, steps)
    threading.Thread(target=server.run_steps, name="model", daemon=True).start()
    with _ends_process("the thread that reads calls"):
        while True:
            if not select.select([calls], [], [], CHECK_S)[0]:
                server.check()
                continue
            for message, number in server.calls.receive():
                if isinstance(message, messages.CloseRank):
                    return
                server.handle(message, number)
            server.check()
    raise AssertionError("the process has ended")


@contextlib.contextmanager
def _ends_process(what: str) -> Iterator[None]:
    """Let an exception be the end of this process, and so of the engine: nobody would answer any
    more.
    """
    try:
        yield
    except ConnectionError as error:
        logger.error("no connection to the engine any more: %s", error)
        os._exit(EXIT_LOST)
    except BaseException:  # whatever it is: the engine waits for this process's answers
        logger.exception("a defect of %s costs this engine", what)
        os._exit(EXIT_LOST)


class _RankServer:
    _executor: UniprocExecutor
    # If it serves adapters.
    _adapters: AdapterHost
    _source: ModelSource
    _tokenizer_info: TokenizerInfo | None = None
    _transport: TransportHost | None = None

    def __init__(self, calls: socket.socket, steps: socket.socket) -> None:
        codec = messages.make_codec(self.read_grammar)
        self.calls, self._steps = Connection(calls, codec), Connection(steps, codec)

    def read_grammar(self, text: str, first_mask_s: float) -> CompiledGrammar:
        """Return the grammar of a text that the engine has made of one."""
        if self._tokenizer_info is None:
            self._tokenizer_info = self._source.tokenizer_info()
        return CompiledGrammar.deserialize(text, self._tokenizer_info, first_mask_s)

    def handle(self, message: Message, number: int) -> None:
        """Begin to do what a message asks for, beside steps."""
        if isinstance(message, messages.TransportCommand):
            assert self._transport is not None, message
            self._transport.handle(message)
        else:
            args = (self.calls, number, message)
            threading.Thread(target=self.answer, args=args).start()

    def run_steps(self) -> None:
        """Run steps, and do what comes behind them, one after the other. Never returns."""
        with _ends_process("the thread that runs steps"):
            for message, number in self._steps.messages():
                self._run(message, number)

    def _run(self, message: Message, number: int) -> None:
        if isinstance(message, SchedulerOutput):
            step = self._executor.submit(message)
            step.add_done_callback(lambda future: self._answer_step(number, future))
        elif isinstance(message, messages.AdapterCommand):
            self._adapters.handle(message)
            if (failure := self._executor.failure()) is not None:
                raise RuntimeError(failure)
        elif isinstance(message, messages.Recover):
            self._executor.recover()
        else:
            assert isinstance(message, Call), message
            self.answer(self._steps, number, message)

    def answer(self, connection: Connection[Message], number: int, call: Call[Any]) -> None:
        """Do what a call asks for, and send what comes of it."""
        with _ends_process("a call"):
            connection.send(answer(call, _HANDLERS, self), number)

    def check(self) -> None:
        """Look whether all is well; to be called often."""
        if self._transport is not None:
            self._transport.check()

    def _answer_step(self, number: int, step: "Future[ExecutedStep]") -> None:
        with _ends_process("the answer to a step"):  # futures swallow what callbacks raise
            error = step.exception()
            if error is None:
                self._steps.send(step.result(), number)
            else:
                logger.error("a step failed", exc_info=error)
                self._steps.send(Failed.of(RuntimeError(str(error))), number)

    def _make_pool(self, call: messages.MakePool) -> None:
        self._executor.make_pool(call.num_blocks, max_model_len=call.max_model_len)
        if self._executor.adapters is not None:
            self._adapters = AdapterHost(self._executor.adapters)

    def _open_transport(self, call: messages.OpenTransport) -> object:
        (transport,) = self._executor.open_transports(call.identity)
        self._transport = TransportHost(transport, self._send_event)
        return transport.endpoint()

    def _send_event(self, event: messages.TransportEvent) -> None:
        with _ends_process("an event of the KV transport"):
            self.calls.send(event, 0)

    def _close_transport(self, call: messages.CloseTransport) -> None:
        if self._transport is not None:
            self._transport.close()

    def _load(self, call: messages.LoadRank) -> object:
        spec = call.spec
        setup_logging(call.log_level, f"{call.name}.{spec.rank}")
        load_general_plugins()
        device = torch.device(call.config.device)
        if device.type == "cuda":
            use_gpu(spec.rank)
        stage = Stage(
            spec.stage,
            spec.num_stages,
            join_group(spec.before, device),
            join_group(spec.after, device),
        )
        self._source = ModelSource(
            call.config, spec.rank, join_group(spec.tensor_parallel, device), stage
        )
        self._executor = UniprocExecutor(
            Rank(call.config, self._source, name=f"{call.name}-{spec.rank}"),
            async_scheduling=True,
            model_thread=CallerThread(),
        )
        return messages.LoadedRank(self._executor.load(), self._source.compatibility_hash)


_HANDLERS: Handlers[_RankServer] = {
    messages.DescribeBuild: lambda server, call: this_build(),
    messages.LoadRank: _RankServer._load,
    messages.DetermineNumBlocks: lambda server, call: server._executor.determine_num_blocks(),
    messages.MakePool: _RankServer._make_pool,
    messages.ReadAdapter: lambda server, call: server._adapters.read(call),
    messages.OpenTransport: _RankServer._open_transport,
    messages.CloseTransport: _RankServer._close_transport,
    messages.StopRank: lambda server, call: server._executor.stop(),
    **{cls: lambda server, call: server._executor.collective_rpc(call)[0] for cls in RANK_CALLS},
}
