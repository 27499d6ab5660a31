"""The engine's end of the grammar compiler: a queue, a process, and what it has compiled."""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, TimeoutError
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from pdserve_common.errors import (
    EngineDeadError,
    InvalidRequestError,
    OverloadedError,
    PdserveError,
    RequestFailedError,
)
from pdserve_common.observability import defects
from pdserve_common.processes.call_thread import CallThread
from pdserve_common.processes.calls import Call
from pdserve_common.structured import StructuralTag, check_bounds
from pdserve_common.structured.accepted import StructuralTags, digest_of
from pdserve_common.structured.reasoning import Reasoning
from pdserve_common.types.sampling_params import StructuredOutputsParams
from pdserve_engine.grammar.cache import GrammarCache
from pdserve_engine.grammar.compiler_client import CompilerProcess
from pdserve_engine.grammar.compiler_process import LOWEST_PRIORITY, MAX_SMALL_BYTES
from pdserve_engine.grammar.fair_jobs import FairJobs
from pdserve_engine.grammar.messages import (
    Compile,
    Compiled,
    CompiledLarge,
    Killed,
    NotEnforced,
    Read,
    ReadConstraint,
    Refused,
    TimedOut,
)
from pdserve_engine.grammar.native import (
    CompiledGrammar,
    TokenizerInfo,
    compile_structural_tag,
)

logger = logging.getLogger(__name__)

FIELD = "structured_outputs"
MAX_TEXT_BYTES = 1024 * 1024
MAX_QUEUED = 64
# One that has waited so long is refused instead of compiled: longer than one of each of two other
# clients may take.
MAX_QUEUED_S = 30.0
RETRY_AFTER_MS = 1000
CACHE_BYTES = 128 * 1024 * 1024
# For what took the process 2 s of CPU time at most, at the lowest priority here too.
MAX_AGAIN_S = 30.0
CLOSE_TIMEOUT_S = 5.0
MAX_ATTEMPTS = 2

Outcome = Literal["compiled", "cached", "refused", "overloaded", "failed"]
# Told of an outcome and of the seconds since it was asked for.
Observe = Callable[[Outcome, float], None]
ResultT = TypeVar("ResultT")


@dataclass(slots=True, kw_only=True, eq=False)
class _Job:
    # The digest of the structural tag, or of the constraint that becomes one.
    digest: str
    source: StructuralTag | ReadConstraint
    queued_at: float
    # The clients that wait for it; each has it among its own.
    clients: set[str]
    is_taken: bool = False
    future: "Future[CompiledGrammar]" = field(default_factory=Future)


class GrammarCompiler:
    """Reads constraints and compiles their structural tags, one at a time, in a process that starts
    with the first of them. Clients take turns, by how long theirs have taken so far.
    """

    def __init__(
        self,
        tokenizer_info: TokenizerInfo,
        *,
        observe: Observe = lambda outcome, duration_s: None,
        max_queued: int = MAX_QUEUED,
        cache_bytes: int = CACHE_BYTES,
        serves_large: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`observe` is called on the compiler's thread or on that of `submit`. Without
        `serves_large` what is too large as text is refused: another process has to have it.
        """
        self._tokenizer_info = tokenizer_info
        self._observe = observe
        self._max_queued = max_queued
        self._serves_large = serves_large
        self._clock = clock
        self._lock = threading.Lock()
        # Guarded by _lock.
        self._tags = StructuralTags()
        self._cache = GrammarCache(cache_bytes)
        self._pending: dict[str, _Job] = {}
        self._process: CompilerProcess | None = None
        self._is_closed = False
        self._jobs: FairJobs[_Job] = FairJobs()
        self._again = CallThread("grammar-compiler-large", niceness=LOWEST_PRIORITY)
        # The process starts with its first call, and ends with it.
        self._thread = CallThread("grammar-compiler")

    def compile(
        self,
        params: StructuredOutputsParams,
        reasoning: Reasoning | None = None,
        client: str = "",
    ) -> "Future[CompiledGrammar]":
        """As `submit`, of a constraint, behind reasoning if there is some. Raises
        InvalidRequestError for what `check_bounds` refuses, and for markers of the reasoning.
        """
        check_bounds(params)
        info = self._tokenizer_info
        before = (
            ()
            if reasoning is None
            else reasoning.formats(info.added_token_ids, info.stop_token_ids)
        )
        digest = digest_of(params, before).hex()
        with self._lock:
            tag = self._tags.get(digest)
        if tag is not None:
            return self.submit(tag, client)
        return self._queue(digest, ReadConstraint(params, tuple(before)), client)

    def submit(self, tag: StructuralTag, client: str = "") -> "Future[CompiledGrammar]":
        """Compile a structural tag in a turn of this client's. Any thread; returns at once. If too
        many wait, one of the client that has most is refused.

        Several may get the same future: do not cancel it. Its exception is InvalidRequestError for
        what is no grammar or takes too much, OverloadedError if the queue is too long,
        RequestFailedError if the compiler was killed twice, EngineDeadError after `close`.
        """
        return self._queue(tag.digest, tag, client)

    def _queue(
        self, digest: str, source: StructuralTag | ReadConstraint, client: str
    ) -> "Future[CompiledGrammar]":
        job = _Job(digest=digest, source=source, queued_at=self._clock(), clients={client})
        dropped: _Job | None = None
        with self._lock:
            if (pending := self._pending.get(digest)) is not None:
                self._join(pending, client)
                return pending.future
            grammar = self._cache.get(digest)
            error = self._refusal(source)
            if grammar is None and error is None and len(self._pending) >= self._max_queued:
                dropped = self._jobs.drop_newest(client, lambda each: each.clients)
                if dropped is None:
                    error = self._too_many()
                else:
                    del self._pending[dropped.digest]
            if grammar is None and error is None:
                self._pending[digest] = job
                self._put(client, job)
        if dropped is not None:
            self._fail(dropped, self._too_many())
        if grammar is not None:
            self._succeed(job, grammar, "cached")
        elif error is not None:
            self._fail(job, error)
        return job.future

    def close(self) -> None:
        """End the process; what is not compiled yet never is."""
        with self._lock:
            self._is_closed = True
            if self._process is not None:
                self._process.kill()
                # Behind what is left, of which each is refused.
                self._thread.submit(self._drop_process)
        self._thread.close(CLOSE_TIMEOUT_S)
        self._again.close(CLOSE_TIMEOUT_S)

    def _refusal(self, source: StructuralTag | ReadConstraint) -> PdserveError | None:
        if self._is_closed:
            return _closed()
        if isinstance(source, ReadConstraint):
            return None  # it has a limit of its own
        num_bytes = len(source.text.encode(errors="surrogatepass"))
        if num_bytes > MAX_TEXT_BYTES:
            return InvalidRequestError(
                f"{FIELD} has {num_bytes} bytes, at most {MAX_TEXT_BYTES} are compiled",
                field=FIELD,
            )
        return None

    def _too_many(self) -> PdserveError:
        return _overloaded(f"{self._max_queued} grammars wait to be compiled")

    def _join(self, job: _Job, client: str) -> None:
        """One more waits for it, and may have an earlier turn."""
        if not job.is_taken and client not in job.clients:
            job.clients.add(client)
            self._put(client, job)

    def _put(self, client: str, job: _Job) -> None:
        self._jobs.put(client, job)
        self._thread.post(
            self._serve_next,
            "grammar",
            costs="the grammars that wait",  # nobody can tell whose turn it is
            on_defect=self._drop_all,
        )

    # ---- on the thread

    def _serve_next(self) -> None:
        """Serve the job whose turn it is; none if it was served in a turn of another client's."""
        start = self._clock()
        turn = self._next()
        if turn is None:
            return
        client, job = turn
        try:
            self._serve(job)
        except BaseException as error:  # whatever a library raises costs the one who asked
            defects.record("grammar", error, "one grammar")
            with defects.contained("grammar", "a wait for the compiler's end"):
                self._drop_process()  # an answer to this job may still come from it
            if not job.future.done():
                job.future.set_exception(_failed(error))
                self._count(job, "failed")
            self._forget(job)
        with self._lock:
            self._jobs.charge(client, self._clock() - start)

    def _next(self) -> tuple[str, _Job] | None:
        with self._lock:
            if not self._jobs:
                return None
            client, job = self._jobs.pop()
            job.is_taken = True
            for other in job.clients - {client}:
                self._jobs.discard(other, job)
            return client, job

    def _drop_all(self, error: BaseException) -> None:
        """Begin with an empty queue."""
        with self._lock:
            dropped, self._pending, self._jobs = self._pending, {}, FairJobs()
        for job in dropped.values():
            if not job.future.done():
                job.future.set_exception(_failed(error))

    def _serve(self, job: _Job) -> None:
        try:
            grammar, outcome = self._make(job)
        except PdserveError as error:
            self._forget(job)
            self._fail(job, error)
        else:
            self._forget(job)
            self._succeed(job, grammar, outcome)

    def _forget(self, job: _Job) -> None:
        """Take a job off the list, if it is there."""
        with self._lock:
            self._pending.pop(job.digest, None)

    def _succeed(self, job: _Job, grammar: CompiledGrammar, outcome: Outcome) -> None:
        self._count(job, outcome)
        job.future.set_result(grammar)

    def _fail(self, job: _Job, error: PdserveError) -> None:
        self._count(job, _outcome(error))
        job.future.set_exception(error)

    def _count(self, job: _Job, outcome: Outcome) -> None:
        with defects.contained("metrics", "a figure"):
            self._observe(outcome, self._clock() - job.queued_at)

    def _make(self, job: _Job) -> tuple[CompiledGrammar, Outcome]:
        """Return what comes of a job; what is compiled is kept."""
        waited_s = self._clock() - job.queued_at
        if waited_s > MAX_QUEUED_S:
            raise _overloaded(f"the grammar waited {waited_s:.0f} s to be compiled")
        tag = job.source
        if isinstance(tag, ReadConstraint):
            tag = self._read(job.digest, tag)
        with self._lock:
            # One of another spelling, or its constraint, may have been compiled meanwhile.
            known = self._cache.get(tag.digest)
        if known is not None:
            return known, "cached"
        grammar = self._compile(tag)
        with self._lock:
            self._cache.put(tag.digest, grammar)
        return grammar, "compiled"

    def _read(self, digest: str, constraint: ReadConstraint) -> StructuralTag:
        """Return a constraint's tag, which is kept."""
        answer = self._ask(constraint)
        if isinstance(answer, NotEnforced):
            raise InvalidRequestError(answer.message, field=answer.field)
        assert isinstance(answer, Read)
        tag = StructuralTag(text=answer.text, digest=answer.digest)
        with self._lock:
            self._tags.put(digest, tag)
        return tag

    def _compile(self, tag: StructuralTag) -> CompiledGrammar:
        answer = self._ask(Compile(tag.text.encode(errors="surrogatepass")))
        if isinstance(answer, CompiledLarge) and not self._serves_large:
            raise InvalidRequestError(
                f"{FIELD} takes more than {MAX_SMALL_BYTES} bytes compiled, which a worker of "
                "several ranks does not serve",
                field=FIELD,
            )
        if isinstance(answer, CompiledLarge):
            return self._compile_again(tag.text)
        assert isinstance(answer, Compiled)
        try:
            return CompiledGrammar.deserialize(
                answer.grammar, self._tokenizer_info, answer.first_mask_s
            )
        except RuntimeError as error:
            raise RequestFailedError(f"the compiled grammar cannot be read: {error}") from error

    def _compile_again(self, text: str) -> CompiledGrammar:
        """Compile here what the process has proven to stay within its bounds."""
        future = self._again.submit(lambda: compile_structural_tag(text, self._tokenizer_info))
        try:
            return future.result(MAX_AGAIN_S)
        except TimeoutError:
            raise _overloaded(f"the grammar was not compiled after {MAX_AGAIN_S:g} s") from None
        except (RuntimeError, MemoryError) as error:
            raise RequestFailedError(f"the grammar cannot be compiled again: {error}") from error

    def _ask(self, call: Call[ResultT]) -> ResultT:
        """Ask once more if the compiler is killed at work; what is returned is not Unfinished."""
        for _ in range(MAX_ATTEMPTS):
            try:
                answer = self._get_process().ask(call)
            except OSError as error:
                logger.warning("the grammar compiler has ended: %s", error)
                self._drop_process()
                continue
            if isinstance(answer, Refused):
                raise InvalidRequestError(f"{FIELD} is refused: {answer.reason}", field=FIELD)
            if isinstance(answer, TimedOut):
                raise _overloaded(f"the grammar was not compiled after {answer.after_s:g} s")
            if not isinstance(answer, Killed):
                return answer
        raise RequestFailedError(f"the grammar compiler was killed {MAX_ATTEMPTS} times")

    def _get_process(self) -> CompilerProcess:
        """Raises OSError if it does not start."""
        with self._lock:
            if self._is_closed:
                raise _closed()
            if self._process is not None:
                return self._process
            self._process = CompilerProcess()
        self._process.get_ready(self._tokenizer_info.serialize())
        return self._process

    def _drop_process(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.close()  # it may take its time, in which others ask for grammars


def _failed(error: BaseException) -> PdserveError:
    return RequestFailedError(f"the grammar compiler failed: {error!r}")


def _closed() -> PdserveError:
    return EngineDeadError("the engine has ended")


def _overloaded(message: str) -> PdserveError:
    return OverloadedError(message, retry_after_ms=RETRY_AFTER_MS)


def _outcome(error: PdserveError) -> Outcome:
    if isinstance(error, InvalidRequestError):
        return "refused"
    return "overloaded" if isinstance(error, OverloadedError) else "failed"
