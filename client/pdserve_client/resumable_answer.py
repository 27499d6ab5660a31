"""What a caller has of an answer, kept so that another router can go on with it."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc

from pdserve.v1 import engine_core_pb2 as core_pb2
from pdserve.v1 import inference_service_pb2 as pb2
from pdserve_common.validation import DRAWN_SEED_BITS

MIN_BACKOFF_S = 0.1
MAX_BACKOFF_S = 2.0


@dataclass(slots=True)
class _Completion:
    """What the caller has of one completion."""

    token_ids: list[int] = field(default_factory=list)
    is_finished: bool = False
    # By which the next router knows who may go on with it.
    origin: str = ""
    cumulative_logprob: float | None = None
    # Those of the last message: of all tokens if outputs are cumulative.
    positions: Sequence[core_pb2.LogprobsLists.Position] = ()
    # As they were when the stream that is read now began.
    resumed_logprob: float | None = None
    resumed_positions: Sequence[core_pb2.LogprobsLists.Position] = ()


class ResumableAnswer:
    """One call's answer, over as many streams as it takes. The caller sees one.

    A stream is lost when its status is UNAVAILABLE (the router is gone, hangs, shuts down or has no
    workers), when it came to a router at the moment of its shutdown, or when its router shuts down
    and hands it back with DRAINING. Every other status, and every other error in the stream's last
    message, is the call's end.
    """

    def __init__(
        self,
        request: pb2.GenerateRequest,
        *,
        num_routers: int,
        router: int,
        max_resumes: int,
        timeout_s: float | None,
    ) -> None:
        """Routers are counted from 0; `router` is the first to be asked."""
        params = request.sampling_params
        if not params.HasField("seed"):
            # Drawn here, so that a request that has brought nothing is the same the second time.
            params.seed = secrets.randbits(DRAWN_SEED_BITS)
        # To be sent next, to `router`.
        self.request = request
        self.router = router
        self.is_finished = False
        # Set when the router has handed the request back: in how many seconds to send it on.
        self.resume_delay_s: float | None = None
        self._num_routers = num_routers
        self._num_resumes_left = max_resumes
        self._num_resumes = 0
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._is_cumulative = params.output_kind == core_pb2.REQUEST_OUTPUT_KIND_CUMULATIVE
        self._may_resume = not (params.use_beam_search or params.HasField("best_of"))
        self._completions: dict[int, _Completion] = {}

    @property
    def remaining_s(self) -> float | None:
        """Until the call's deadline."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def take(self, output: pb2.RequestOutput) -> pb2.RequestOutput | None:
        """Return what the caller does not have of a message; None if it has all of it."""
        self.request.request_id = self.request.request_id or output.request_id
        if _is_handed_back(output):
            self.resume_delay_s = self._turn_to_next()
            if self.resume_delay_s is not None:
                return None
        if self._completions:
            self._drop_known(output)
        for completion in output.outputs:
            self._note(completion)
        self.is_finished = output.finished
        return output if output.outputs or output.finished else None

    def on_loss(self, error: grpc.RpcError) -> float:
        """A stream broke. Returns in how many seconds the next one is to begin; raises `error` if
        there is to be none.
        """
        is_lost = error.code() is grpc.StatusCode.UNAVAILABLE or _came_too_late(error)
        delay_s = self._turn_to_next() if is_lost else None
        if delay_s is None:
            raise error
        return delay_s

    def begin_stream(self) -> None:
        """The request is about to be sent."""
        self.resume_delay_s = None

    def _turn_to_next(self) -> float | None:
        """Prepare the next stream. Returns in how many seconds it is to begin; None if there is to
        be none.
        """
        has_tokens = any(known.token_ids for known in self._completions.values())
        if not self._num_resumes_left or (has_tokens and not self._may_resume):
            return None
        self._num_resumes += 1
        self._num_resumes_left -= 1
        delay_s = self._delay_s()
        remaining_s = self.remaining_s
        if remaining_s is not None and delay_s >= remaining_s:
            return None
        self.router = (self.router + 1) % self._num_routers
        self._resume()
        return delay_s

    def _delay_s(self) -> float:
        """The next router is asked at once; before the first one's turn comes again, longer with
        every round.
        """
        num_rounds, num_asked = divmod(self._num_resumes, self._num_routers)
        # This many doublings are far beyond the maximum.
        delay_s = MIN_BACKOFF_S * 2 ** min(num_rounds - 1, 10)
        return 0.0 if num_asked else min(MAX_BACKOFF_S, delay_s)

    def _resume(self) -> None:
        del self.request.resume[:]
        for index, known in sorted(self._completions.items()):
            known.resumed_logprob = known.cumulative_logprob
            known.resumed_positions = known.positions
            if known.token_ids or known.is_finished:
                self.request.resume.add(
                    index=index,
                    token_ids=known.token_ids,
                    finished=known.is_finished,
                    origin=known.origin,
                )

    def _drop_known(self, output: pb2.RequestOutput) -> None:
        """Cut what came over an earlier stream, and fill in what only that one has brought."""
        output.ClearField("prompt_token_ids")
        output.ClearField("prompt_logprobs")
        completions = [each for each in output.outputs if not self._is_over(each.index)]
        if len(completions) < len(output.outputs):
            kept = pb2.RequestOutput(outputs=completions)
            output.ClearField("outputs")
            output.MergeFrom(kept)
        for completion in output.outputs:
            self._fill_in(completion)

    def _is_over(self, index: int) -> bool:
        return index in self._completions and self._completions[index].is_finished

    def _fill_in(self, completion: pb2.CompletionOutput) -> None:
        known = self._completions.get(completion.index)
        if known is None:
            return
        if known.resumed_logprob is not None:
            completion.cumulative_logprob += known.resumed_logprob
        if self._is_cumulative:
            for position, resumed in zip(
                completion.logprobs.positions, known.resumed_positions, strict=False
            ):
                position.CopyFrom(resumed)

    def _note(self, completion: pb2.CompletionOutput) -> None:
        known = self._completions.setdefault(completion.index, _Completion())
        if self._is_cumulative:
            known.token_ids.clear()
        known.token_ids.extend(completion.token_ids)
        known.positions = completion.logprobs.positions
        known.origin = completion.origin or known.origin
        if completion.HasField("cumulative_logprob"):
            known.cumulative_logprob = completion.cumulative_logprob
        known.is_finished = bool(completion.finish_reason)


def _came_too_late(error: grpc.RpcError) -> bool:
    """gRPC's servers end so what was on its way as they said that they take nothing more. A status
    of our routers, and that of a call which this process cancels, has other words.
    """
    return error.code() is grpc.StatusCode.CANCELLED and error.details() == "CANCELLED"


def _is_handed_back(output: pb2.RequestOutput) -> bool:
    codes = [each.error.code for each in output.outputs if each.HasField("error")]
    return output.finished and core_pb2.ERROR_CODE_DRAINING in codes
