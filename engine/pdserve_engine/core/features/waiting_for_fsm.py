"""Requests whose output has to follow a grammar, until that is compiled."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future

from pdserve_common.errors import InvalidRequestError, PdserveError, RequestFailedError
from pdserve_common.observability import defects
from pdserve_common.structured.reasoning import Reasoning, reasoning_of
from pdserve_common.types.sampling_params import StructuredOutputsParams
from pdserve_engine.grammar.native import CompiledGrammar
from pdserve_engine.request.request import Request, RequestContainer, RequestStatus

# Compiles a constraint, behind reasoning if there is some, for a client. Returns at once, with a
# future whose exception is a PdserveError, or raises one.
CompileGrammar = Callable[
    [StructuredOutputsParams, Reasoning | None, str], "Future[CompiledGrammar]"
]


class WaitingForFSM(RequestContainer):
    """Requests that could start, but for their grammars. Those that wait for something else as well
    are where they wait for that.
    """

    statuses = (RequestStatus.WAITING_FOR_FSM,)

    def __init__(self, compile_grammar: CompileGrammar | None, wakeup: Callable[[], None]) -> None:
        """`wakeup` is called on any thread when a grammar is there."""
        self._compile = compile_grammar
        self._wakeup = wakeup
        self._requests: dict[Request, None] = {}
        # The grammars of requests that are here or elsewhere.
        self._compiling: dict[Request, Future[CompiledGrammar]] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def start(self, request: Request) -> PdserveError | None:
        """Have the grammar of a new request compiled, if it asks for one; return why that cannot
        be, if that is known at once.
        """
        params = request.sampling_params
        if params.structured_outputs is None:
            return None
        if self._compile is None:
            return InvalidRequestError(
                "structured_outputs is set, this worker serves none", field="structured_outputs"
            )
        try:
            reasoning = reasoning_of(request.core_request, params)
            future = self._compile(
                params.structured_outputs, reasoning, request.core_request.client_id
            )
        except PdserveError as error:
            return error
        except Exception as error:  # its text is a client's: it costs no one else
            defects.record("grammar", error, f"request {request.request_id}")
            return RequestFailedError(f"the grammar compiler failed: {error!r}")
        if future.done():
            return _apply(request, future)
        self._compiling[request] = future
        future.add_done_callback(lambda _: self._wakeup())
        return None

    def has_grammar(self, request: Request) -> bool:
        """May it start, as far as its grammar goes, wherever it is?"""
        return request not in self._compiling

    def add(self, request: Request) -> None:
        request.entered(self)
        self._requests[request] = None

    def remove_request(self, request: Request) -> None:
        del self._requests[request]
        request.left()

    def take_compiled(self) -> list[tuple[Request, PdserveError | None]]:
        """Give requests their grammars that have come since the last call; return those requests,
        wherever they are, and why there is none. Until then a grammar does not count as ready: it
        may come at any time, and a request that starts must not be found to have waited for it.
        """
        ready = [request for request, future in self._compiling.items() if future.done()]
        taken = [(request, _apply(request, self._compiling.pop(request))) for request in ready]
        return [(request, error) for request, error in taken if not request.status.is_finished]


def _apply(request: Request, future: "Future[CompiledGrammar]") -> PdserveError | None:
    """Give a request its grammar, which is compiled; return why there is none."""
    error = future.exception()
    if error is not None:
        assert isinstance(error, PdserveError), error
        return error
    request.grammar = future.result()
    return None
