"""Requests whose output has to follow a grammar, until that is compiled."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future

from pdserve_common.errors import InvalidRequestError, PdserveError
from pdserve_common.sampling_params import StructuredOutputsParams
from pdserve_engine.grammar.native import CompiledGrammar
from pdserve_engine.request.request import Place, Request, RequestStatus

# Returns at once, with a future whose exception is a PdserveError, or raises one.
CompileGrammar = Callable[[StructuredOutputsParams], "Future[CompiledGrammar]"]


class WaitingForFSM(Place):
    """Requests that could start, but for their grammars. Those that wait for something else as well
    are where they wait for that.
    """

    statuses = (RequestStatus.WAITING_FOR_FSM,)

    def __init__(self, compile_grammar: CompileGrammar | None, wakeup: Callable[[], None]) -> None:
        """`wakeup` is called on any thread when a grammar is there."""
        self._compile = compile_grammar
        self._wakeup = wakeup
        self._requests: dict[Request, None] = {}
        # Here or elsewhere.
        self._compiling: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def start(self, request: Request) -> PdserveError | None:
        """Have the grammar of a new request compiled, if it asks for one; return why that cannot
        be, if that is known at once.
        """
        params = request.sampling_params.structured_outputs
        if params is None:
            return None
        if self._compile is None:
            return InvalidRequestError(
                "structured_outputs is set, this worker serves none", field="structured_outputs"
            )
        try:
            request.grammar = self._compile(params)
        except PdserveError as error:
            return error
        if request.grammar.done():
            return grammar_error(request)
        self._compiling.append(request)
        request.grammar.add_done_callback(lambda _: self._wakeup())
        return None

    def add(self, request: Request) -> None:
        request.entered(self)
        self._requests[request] = None

    def remove_request(self, request: Request) -> None:
        del self._requests[request]
        request.left()

    def take_compiled(self) -> list[Request]:
        """Return the requests whose grammars are ready since the last call, wherever they are."""
        ready = [request for request in self._compiling if request.is_grammar_ready]
        if ready:
            self._compiling = [r for r in self._compiling if not r.is_grammar_ready]
        return [request for request in ready if not request.status.is_finished]


def grammar_error(request: Request) -> PdserveError | None:
    """Return why there is no grammar, of a request whose grammar is ready."""
    error = None if request.grammar is None else request.grammar.exception()
    assert error is None or isinstance(error, PdserveError), error
    return error
