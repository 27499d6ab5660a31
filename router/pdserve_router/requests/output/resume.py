"""Going on with an answer whose stream broke: what a client says of it."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pdserve_common.errors import InvalidRequestError
from pdserve_common.limits.validation import validate_token_ids
from pdserve_common.types.capabilities import adapter_not_held
from pdserve_common.types.lora import LoRARequest
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_router.requests.input.request_limits import MAX_RESUMED_TOKENS
from pdserve_router.workers.model_version import UNKNOWN, ModelVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumedCompletion:
    """What a broken stream had brought of completion `index`."""

    index: int
    token_ids: tuple[int, ...] = ()
    is_finished: bool = False
    model_version: ModelVersion = UNKNOWN

    @property
    def is_begun(self) -> bool:
        """False if it is like any other completion."""
        return bool(self.token_ids) or self.is_finished


def begun_adapter(
    resume: Sequence[ResumedCompletion], name: str, held: Collection[str]
) -> LoRARequest | None:
    """Return the adapter that an answer has begun with, of the digests that are `held`; None if it
    has not begun, or without one. `name` is what the request names, empty for none. Raises
    InvalidRequestError if it was begun with another one, AdapterNotHeldError if that is gone.
    """
    known = {
        each.model_version.adapter
        for each in resume
        if each.token_ids and each.model_version.weights
    }
    if not known:
        return None
    begun = max(known)
    if len(known) > 1 or bool(begun) is not bool(name):
        raise InvalidRequestError(
            f"lora_name is {name[:256]!r}, resume.model_version has the adapter {begun or 'none'}",
            field="lora_name",
        )
    if not begun:
        return None
    digest = next((each for each in held if each.startswith(begun)), None)
    if digest is None:
        raise adapter_not_held(LoRARequest(lora_name=name, digest=begun))
    return LoRARequest(lora_name=name, digest=digest)


def validate_resume(
    resume: Sequence[ResumedCompletion], params: SamplingParams, *, vocab_size: int
) -> None:
    """Raise InvalidRequestError unless `resume` can be the beginning of an answer to a request with
    these parameters, of which max_tokens is set.
    """
    if not resume:
        return
    for name, is_set in (
        ("use_beam_search", params.use_beam_search),
        ("best_of", params.best_of is not None),
    ):
        if is_set:
            raise _invalid(f"is set with {name}: nothing of such an answer is known before its end")
    indexes = [completion.index for completion in resume]
    if not 0 <= min(indexes) <= max(indexes) < params.n:
        raise _invalid(f"has index {max(indexes)}, must be 0 to {params.n - 1}")
    if len(set(indexes)) < len(indexes):
        raise _invalid("names an index twice")
    num_tokens = sum(len(completion.token_ids) for completion in resume)
    if num_tokens > MAX_RESUMED_TOKENS:
        raise _invalid(f"has {num_tokens} tokens, at most {MAX_RESUMED_TOKENS}")
    assert params.max_tokens is not None, "the input processor fills it in"
    for completion in resume:
        if len(completion.token_ids) > params.max_tokens:
            raise _invalid(
                f"has {len(completion.token_ids)} tokens of completion {completion.index}, "
                f"max_tokens is {params.max_tokens}"
            )
        validate_token_ids("resume.token_ids", completion.token_ids, vocab_size)


def require_seed(params: SamplingParams) -> None:
    """Raise InvalidRequestError without a seed: another one would go on with another answer."""
    if params.seed is None:
        raise _invalid("needs sampling_params.seed, as the broken answer told it")


def _invalid(problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"resume {problem}", field="resume")
