"""What a caller has of an answer, kept so that another router can go on with it."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

from pdserve.v1 import engine_core_pb2 as core_pb2
from pdserve.v1 import inference_service_pb2 as pb2
from pdserve_client.attempts import Attempts
from pdserve_common.limits.validation import DRAWN_SEED_BITS


@dataclass(slots=True)
class _Completion:
    """What the caller has of one completion."""

    token_ids: list[int] = field(default_factory=list)
    is_finished: bool = False
    # By which the next router knows who may go on with it.
    model_version: str = ""
    cumulative_logprob: float | None = None
    # Those of the last message: of all tokens if outputs are cumulative.
    positions: Sequence[core_pb2.LogprobsLists.Position] = ()
    # As they were when the stream that is read now began.
    resumed_logprob: float | None = None
    resumed_positions: Sequence[core_pb2.LogprobsLists.Position] = ()


class ResumableAnswer(Attempts):
    """One call's answer, over as many streams as it takes. The caller sees one.

    A stream is lost as any attempt is, and also when its router shuts down and hands it back with
    DRAINING. Every other error in the stream's last message is the call's end.
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
        """As of Attempts."""
        super().__init__(
            num_routers=num_routers, router=router, max_resumes=max_resumes, timeout_s=timeout_s
        )
        params = request.sampling_params
        if not params.HasField("seed"):
            # Drawn here, so that a request that has brought nothing is the same the second time.
            params.seed = secrets.randbits(DRAWN_SEED_BITS)
        # To be sent next, to `router`.
        self.request = request
        self.is_finished = False
        # Set when the router has handed the request back: in how many seconds to send it on.
        self.resume_delay_s: float | None = None
        self._is_cumulative = params.output_kind == core_pb2.REQUEST_OUTPUT_KIND_CUMULATIVE
        self._may_resume = not (params.use_beam_search or params.HasField("best_of"))
        self._completions: dict[int, _Completion] = {}

    def take(self, output: pb2.RequestOutput) -> pb2.RequestOutput | None:
        """Return what the caller does not have of a message; None if it has all of it."""
        self.request.request_id = self.request.request_id or output.request_id
        if _is_handed_back(output):
            self.resume_delay_s = self.turn_to_next()
            if self.resume_delay_s is not None:
                return None
        if self._completions:
            self._drop_known(output)
        for completion in output.outputs:
            self._note(completion)
        self.is_finished = output.finished
        return output if output.outputs or output.finished else None

    def begin_stream(self) -> None:
        """The request is about to be sent."""
        self.resume_delay_s = None

    def turn_to_next(self) -> float | None:
        """Prepare the next stream; see Attempts."""
        has_tokens = any(known.token_ids for known in self._completions.values())
        if has_tokens and not self._may_resume:
            return None
        delay_s = super().turn_to_next()
        if delay_s is not None:
            self._resume()
        return delay_s

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
                    model_version=known.model_version,
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
        known.model_version = completion.model_version or known.model_version
        if completion.HasField("cumulative_logprob"):
            known.cumulative_logprob = completion.cumulative_logprob
        known.is_finished = bool(completion.finish_reason)


def _is_handed_back(output: pb2.RequestOutput) -> bool:
    codes = [each.error.code for each in output.outputs if each.HasField("error")]
    return output.finished and core_pb2.ERROR_CODE_DRAINING in codes
