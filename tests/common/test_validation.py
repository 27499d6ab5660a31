import dataclasses
import math
import re
import time
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pdserve_common import wire
from pdserve_common.errors import InvalidRequestError
from pdserve_common.limits.request_validation import validate_engine_core_request
from pdserve_common.limits.validation import (
    MAX_PROMPT_LOGPROB_ENTRIES,
    MAX_REPETITION_PENALTY,
    MAX_TIMEOUT_S,
    MIN_REPETITION_PENALTY,
    PROBE_PRIORITY,
    validate_choice,
    validate_prompt_logprobs,
    validate_sampling_params,
)
from pdserve_common.rpc.channels import MAX_MESSAGE_BYTES
from pdserve_common.types.capabilities import Capabilities
from pdserve_common.types.engine import (
    EngineCoreRequest,
    Generate,
    KVPrefixSource,
    KVTransferParams,
    LogprobsLists,
)
from pdserve_common.types.sampling_params import (
    EarlyStopping,
    RepetitionDetectionParams,
    SamplingParams,
    StructuredOutputsParams,
)
from support.engine_info import make_info

INFO = make_info(logits_processors=("known",))
KNOWN = Capabilities.of(INFO)
REQUEST = EngineCoreRequest(
    request_id="r", prompt_token_ids=(1, 2, 3), task=Generate(SamplingParams())
)


def test_good_parameters_pass() -> None:
    validate_sampling_params(
        SamplingParams(temperature=0.0, top_p=1.0, top_k=-1, stop=("x",), seed=2**64 - 1),
        vocab_size=100,
    )
    validate_engine_core_request(REQUEST, INFO)


def test_every_served_parameter_passes_at_the_edge_of_its_range() -> None:
    for params in (
        SamplingParams(
            n=64,
            best_of=64,
            presence_penalty=-2.0,
            frequency_penalty=2.0,
            repetition_penalty=100.0,
            logprobs=20,
            prompt_logprobs=0,
            logits_processors=("known",),
            bad_words=("w" * 256,) * 64,
            bad_words_token_ids=((99,) * 256,) * 128,
            logit_bias={0: -100.0, 99: 100.0},
            allowed_token_ids=tuple(range(100)),
            repetition_detection=RepetitionDetectionParams(max_pattern_size=1024),
        ),
        SamplingParams(
            n=2,
            use_beam_search=True,
            temperature=0.0,
            length_penalty=-0.5,
            early_stopping=EarlyStopping.NEVER,
        ),
    ):
        validate_sampling_params(params, vocab_size=100, capabilities=KNOWN)


def detected(**fields: int) -> dict[str, object]:
    return {"repetition_detection": RepetitionDetectionParams(**fields)}


def constrained(**fields: Any) -> dict[str, object]:
    return {"structured_outputs": StructuredOutputsParams(**fields)}


OBJECT = constrained(json_object=True)


def transferred(**fields: Any) -> dict[str, object]:
    return {"kv_transfer_params": KVTransferParams(**fields)}


PULL: dict[str, Any] = {"do_remote_prefill": True, "remote_engine_id": "p", "remote_host": "h"}
PROBE: dict[str, object] = {
    "priority": PROBE_PRIORITY,
    "task": Generate(SamplingParams(max_tokens=2)),
}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 0}, "n is 0, must be 1 to 64"),
        ({"n": 65}, "n is 65, must be 1 to 64"),
        ({"n": 3, "best_of": 2}, "best_of is 2, must be n (3) to 64"),
        ({"temperature": -0.1}, "temperature is -0.1, must be at least 0 and at most 100"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"top_p": 0.0}, "top_p is 0.0, must be above 0 and at most 1"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"min_p": 2.0}, "min_p is 2.0"),
        ({"top_k": -2}, "top_k is -2"),
        ({"seed": -1}, "seed is -1, must be 0 to 18446744073709551615"),
        ({"max_tokens": 0}, "max_tokens is 0, must be at least 1"),
        ({"min_tokens": -1}, "min_tokens is -1"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens is 5, must be at most max_tokens"),
        ({"stop": ("",)}, "stop has a string of 0 characters"),
        ({"stop": ("x",) * 17}, "stop has 17 strings, at most 16"),
        ({"stop": ("x",), "detokenize": False}, "stop needs detokenize"),
        ({"stop_token_ids": (100,)}, "stop_token_ids has 100, token ids are 0 to 99"),
        ({"stop_token_ids": (1,) * 257}, "stop_token_ids has 257 ids"),
        ({"logprobs": 21}, "logprobs is 21, must be 0 to 20"),
        ({"max_draft_tokens": -1}, "max_draft_tokens is -1, must be 0 to 1024"),
        ({"max_draft_tokens": 1025}, "max_draft_tokens is 1025, must be 0 to 1024"),
        ({"prompt_logprobs": -1}, "prompt_logprobs is -1, must be 0 to 20"),
        ({"presence_penalty": 2.5}, "presence_penalty is 2.5, must be at least -2 and at most 2"),
        ({"frequency_penalty": math.nan}, "frequency_penalty is nan"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0, must be at least 0.015625"),
        ({"repetition_penalty": 1e-40}, "repetition_penalty is 1e-40, must be at least 0.015625"),
        ({"repetition_penalty": 101.0}, "repetition_penalty is 101.0, must be at least 0.015625"),
        ({"repetition_penalty": math.inf}, "repetition_penalty is inf"),
        ({"repetition_penalty": math.nan}, "repetition_penalty is nan"),
        ({"logit_bias": {100: 1.0}}, "logit_bias has 100, token ids are 0 to 99"),
        ({"logit_bias": {1: 100.5}}, "logit_bias[1] is 100.5, must be at least -100"),
        ({"logit_bias": dict.fromkeys(range(1025), 0.0)}, "logit_bias has 1025 tokens, at most"),
        ({"allowed_token_ids": (1, 100)}, "allowed_token_ids has 100, token ids are 0 to 99"),
        (
            {"allowed_token_ids": (1,) * 101},
            "allowed_token_ids has 101 ids, the vocabulary has 100",
        ),
        ({"bad_words": ("",)}, "bad_words has a word of 0 characters, must be 1 to 256"),
        ({"bad_words": ("w",) * 65}, "bad_words has 65 words, at most 64"),
        ({"bad_words_token_ids": ((),)}, "bad_words_token_ids has a sequence of 0 tokens"),
        ({"bad_words_token_ids": ((100,),)}, "bad_words_token_ids has 100"),
        ({"bad_words_token_ids": ((1,),) * 129}, "bad_words_token_ids has 129 sequences"),
        ({"logits_processors": ("x",)}, "logits_processors has 'x', registered are known"),
        ({"logits_processors": ("known",) * 17}, "logits_processors has 17 names, at most 16"),
        ({"use_beam_search": True}, "temperature is 1, must be 0 with use_beam_search"),
        ({"length_penalty": 2.0}, "length_penalty needs use_beam_search"),
        ({"length_penalty": math.inf}, "length_penalty is inf, must be finite"),
        ({"early_stopping": EarlyStopping.TRUE}, "early_stopping needs use_beam_search"),
        (
            detected(max_pattern_size=1025),
            "repetition_detection.max_pattern_size is 1025, must be 1 to 1024",
        ),
        (
            detected(max_pattern_size=2, min_pattern_size=3),
            "repetition_detection.min_pattern_size is 3, must be 1 to max_pattern_size (2)",
        ),
        (
            detected(max_pattern_size=2, min_count=1),
            "repetition_detection.min_count is 1, must be 2 to 2147483647",
        ),
        (
            detected(max_pattern_size=2, min_count=2**32),
            "repetition_detection.min_count is 4294967296, must be 2 to 2147483647",
        ),
        (constrained(regex="a"), "structured_outputs is set: not served yet"),
        (constrained(regex="a" * 65537), "structured_outputs.regex has 65537 bytes, at most 65536"),
        (
            constrained(choice=("\ud800",)),
            "structured_outputs.choice has half of a surrogate pair",
        ),
        (
            constrained(regex="a", choice=("a",)),
            "structured_outputs has 2 constraints (regex, choice), must be exactly one of json_",
        ),
        (
            {**OBJECT, "ignore_eos": True},
            "ignore_eos is True, must be False with structured_outputs",
        ),
        ({**OBJECT, "min_tokens": 3}, "min_tokens is 3, must be 0 with structured_outputs"),
        (
            {**OBJECT, "use_beam_search": True},
            "use_beam_search is True, must be False with structured_outputs",
        ),
        (
            constrained(),
            "structured_outputs has 0 constraints (none), must be exactly one of json_schema",
        ),
    ],
)
def test_a_bad_parameter_is_named_with_its_value_and_limit(
    fields: dict[str, object], message: str
) -> None:
    params = dataclasses.replace(SamplingParams(), **fields)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match=re.escape(message)) as error:
        validate_sampling_params(params, vocab_size=100, capabilities=KNOWN)
    assert error.value.field == message.split()[0].partition(".")[0]


def test_prompt_logprobs_are_bounded_by_what_one_message_holds() -> None:
    params = SamplingParams(prompt_logprobs=20)
    # The longest answer of this kind, with the longest texts that such a bound can bear.
    num_tokens = MAX_PROMPT_LOGPROB_ENTRIES // 21
    logprobs = LogprobsLists(
        logprob_token_ids=(tuple(range(200_000, 200_021)),) * num_tokens,
        logprobs=((-1.0,) * 21,) * num_tokens,
        sampled_token_ranks=(200_000,) * num_tokens,
    )
    message = wire.logprobs_to_proto(logprobs, token_text=lambda token_id: "x" * 48)
    assert message.ByteSize() < MAX_MESSAGE_BYTES
    validate_prompt_logprobs(params, num_tokens)
    with pytest.raises(InvalidRequestError, match="prompt_logprobs is 20 for a prompt of 12484"):
        validate_prompt_logprobs(params, num_tokens + 1)
    validate_prompt_logprobs(SamplingParams(), 10**9)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_token_ids": ()}, "prompt is empty"),
        ({"prompt_token_ids": (1,) * 8}, "prompt has 8 tokens, at most 7 fit"),
        ({"prompt_token_ids": (1, 100)}, "prompt_token_ids has 100, token ids are 0 to 99"),
        ({"request_id": ""}, "request_id has 0 characters"),
        ({"request_id": "x" * 257}, "request_id has 257 characters"),
        ({"request_id": "a\nb"}, "request_id must be printable ASCII"),
        ({"resumable": True}, "resumable is set: not served yet"),
        (transferred(), "needs exactly one of"),
        (
            transferred(do_remote_decode=True, remote_engine_id="d"),
            "is for a prefill worker, this is a decode worker",
        ),
        (transferred(do_remote_prefill=True), "remote_engine_id is empty"),
        (transferred(**PULL, remote_port=70000), "no address to pull from"),
        (
            transferred(
                **PULL,
                remote_port=7,
                prefix_source=KVPrefixSource(engine_id="d", host="h", port=7, num_tokens=16),
            ),
            "prefix_source makes no sense",
        ),
        ({"deadline": time.monotonic() + 1e10}, "s, must be at most 604800 s"),
        ({"eos_token_id": 100}, "eos_token_id has 100"),
        (
            {"task": Generate(SamplingParams(n=2))},
            "n is 2: a worker generates one sequence, routers make several of it",
        ),
        (
            {"task": Generate(SamplingParams(best_of=1))},
            "best_of is 1: a worker generates one sequence",
        ),
        (
            {"task": Generate(SamplingParams(use_beam_search=True, temperature=0.0))},
            "use_beam_search is True: a worker generates one sequence",
        ),
        (
            {"task": Generate(SamplingParams(bad_words=("w",)))},
            "bad_words is set without bad_words_token_ids",
        ),
        (
            {"task": Generate(SamplingParams(logits_processors=("x",)))},
            "logits_processors has 'x'",
        ),
        ({"fork_of": "ä"}, "request_id must be printable ASCII"),
        (
            {"fork_of": "parent", **transferred(**PULL, remote_port=7)},
            "fork_of and kv_transfer_params are both set",
        ),
        ({"fork_of": "parent", "attempt": 1}, "fork_of is set, attempt is 1, must be 0"),
        ({"priority": 2**31 - 1}, "priority is 2147483647, must be -2147483646 to 2147483646"),
        ({"priority": -(2**31)}, "priority is -2147483648, must be -2147483646 to 2147483646"),
        ({"priority": PROBE_PRIORITY}, "which is for probes: max_tokens is None, at most 2"),
        (
            {"priority": PROBE_PRIORITY, "task": Generate(SamplingParams(max_tokens=3))},
            "which is for probes: max_tokens is 3, at most 2",
        ),
        (
            {**PROBE, "prompt_token_ids": (1,) * 5},
            "which is for probes: the prompt has 5 tokens, at most 4",
        ),
        ({**PROBE, "fork_of": "parent"}, "which is for probes: fork_of is set, leave it unset"),
    ],
)
def test_a_worker_checks_requests_itself(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        validate_engine_core_request(
            dataclasses.replace(REQUEST, **fields),  # type: ignore[arg-type]
            dataclasses.replace(INFO, block_size=2),
        )


AGES_NS = st.integers(0, 2**64 - 1) | st.integers(0, 2 * MAX_TIMEOUT_S * 10**9)


@settings(deadline=None)
@given(AGES_NS)
@example(2**64 - 1)
@example(2**63)
@example(0)
def test_a_request_is_no_older_than_any_deadline_allows(age_ns: int) -> None:
    message = wire.to_proto(REQUEST)
    message.age_ns = age_ns
    before = time.monotonic()
    request = wire.from_proto(EngineCoreRequest, message)
    assert abs(before - request.arrival_time - age_ns / 1e9) < 100
    # A slow machine adds to its age.
    if age_ns <= (MAX_TIMEOUT_S - 100) * 10**9:
        validate_engine_core_request(request, INFO)
    elif age_ns > MAX_TIMEOUT_S * 10**9:
        with pytest.raises(InvalidRequestError) as caught:
            validate_engine_core_request(request, INFO)
        assert caught.value.field == "age_ns"
        assert re.fullmatch(r"age is \d+ s, must be at most 604800 s", caught.value.message)


@given(st.floats(width=32))
@example(MIN_REPETITION_PENALTY)
@example(MAX_REPETITION_PENALTY)
def test_what_the_router_lets_pass_is_within_bounds_for_the_worker(penalty: float) -> None:
    """The wire has 32 bits for it."""
    params = SamplingParams(repetition_penalty=penalty)
    sent = wire.from_proto(SamplingParams, wire.to_proto(params))
    if MIN_REPETITION_PENALTY <= penalty <= MAX_REPETITION_PENALTY:
        validate_sampling_params(sent, vocab_size=100)
        return
    for refused in (params, sent):
        with pytest.raises(InvalidRequestError, match=r"repetition_penalty is .* at most 100"):
            validate_sampling_params(refused, vocab_size=100)


CONSTRAINED = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
END = {"reasoning_end_str": "</think>"}


@pytest.mark.parametrize(
    ("params", "ended", "kwargs", "field", "reason"),
    [
        (CONSTRAINED, None, {}, None, None),
        (CONSTRAINED, True, {}, None, None),
        (CONSTRAINED, True, END, None, None),
        (CONSTRAINED, False, END, None, None),
        (CONSTRAINED, False, {**END, "reasoning_start_str": "x" * 64}, None, None),
        (SamplingParams(), True, {}, "reasoning_ended", "structured_outputs is not"),
        (SamplingParams(), None, END, "reasoning_parser_kwargs", "structured_outputs is not"),
        (CONSTRAINED, None, END, "reasoning_parser_kwargs", "reasoning_ended is not"),
        (CONSTRAINED, False, {}, "reasoning_ended", "has no reasoning_end_str"),
        (
            CONSTRAINED,
            True,
            {"x" * 999: ""},
            "reasoning_parser_kwargs",
            "has x{100}..., known are reasoning_start_str, reasoning_end_str",
        ),
        *(
            (CONSTRAINED, ended, {**END, name: marker}, "reasoning_parser_kwargs", name + reason)
            for ended in (True, False)
            for name in ("reasoning_start_str", "reasoning_end_str")
            for marker, reason in (
                ("", " is empty"),
                ("é" * 33, " has 66 bytes, at most 64"),
                ("\ud800", " has half of a surrogate pair"),
                ("a\0", " has a NUL character"),
            )
        ),
    ],
)
def test_reasoning_comes_before_a_constraint(
    params: SamplingParams,
    ended: bool | None,
    kwargs: dict[str, str],
    field: str | None,
    reason: str | None,
) -> None:
    fields = ("structured_outputs", "reasoning_ended", "reasoning_parser_kwargs")
    info = dataclasses.replace(INFO, served_fields=fields)
    request = dataclasses.replace(
        REQUEST,
        task=Generate(params),
        eos_token_id=INFO.eos_token_ids[0],
        reasoning_ended=ended,
        reasoning_parser_kwargs=kwargs,
    )
    if field is None:
        validate_engine_core_request(request, info)
        return
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        validate_engine_core_request(request, info)
    assert caught.value.field == field


def test_an_end_of_a_constraint_ends_its_request() -> None:
    info = dataclasses.replace(INFO, served_fields=("structured_outputs",), eos_token_ids=(3, 4))
    for eos, stops, missing in ((3, (4,), None), (9, (4, 3), None), (3, (), 4), (None, (4,), 3)):
        params = dataclasses.replace(CONSTRAINED, stop_token_ids=stops)
        request = dataclasses.replace(REQUEST, task=Generate(params), eos_token_id=eos)
        if missing is None:
            validate_engine_core_request(request, info)
            continue
        with pytest.raises(InvalidRequestError, match=f"may end with token {missing}") as caught:
            validate_engine_core_request(request, info)
        assert caught.value.field == "eos_token_id"


@pytest.mark.parametrize(
    ("fields", "refusal"),
    [
        ({"resume_output_token_ids": (1, 100)}, "resume_output_token_ids has 100, token ids are"),
        ({"resume_output_token_ids": (1,) * 5}, "has 5 tokens, the request ends after 5"),
        (
            {
                "resume_output_token_ids": (1, 2),
                "task": Generate(SamplingParams(max_tokens=2)),
            },
            "has 2 tokens, the request ends after 2",
        ),
        ({"attempt": 1001}, "attempt is 1001, must be at most 1000"),
    ],
)
def test_a_resumed_request_has_something_left_to_generate(
    fields: dict[str, object], refusal: str
) -> None:
    resumed = dataclasses.replace(REQUEST, attempt=1, resume_output_token_ids=(1, 2, 3, 4))
    validate_engine_core_request(resumed, INFO)
    with pytest.raises(InvalidRequestError, match=refusal):
        validate_engine_core_request(
            dataclasses.replace(REQUEST, **fields),  # type: ignore[arg-type]
            INFO,
        )


@pytest.mark.parametrize(
    ("fields", "field", "reason"),
    [
        (
            {"allowed_token_ids": (0,), "min_tokens": 2},
            "allowed_token_ids",
            "of the 1 tokens in allowed_token_ids none is left to choose, must be at least 1: "
            "min_tokens (2) bans 1, which would end it",
        ),
        (
            {
                "allowed_token_ids": (5, 6, 7),
                "bad_words_token_ids": ((5,), (6,), (8, 9)),
                "stop_token_ids": (7,),
                "min_tokens": 1,
            },
            "allowed_token_ids",
            "of the 3 tokens in allowed_token_ids none is left to choose, must be at least 1: "
            "min_tokens (1) bans 2, which would end it, bad_words bans 2",
        ),
        (
            {"bad_words_token_ids": tuple((i,) for i in range(100))},
            "bad_words",
            "of the 100 tokens in the vocabulary none is left to choose, must be at least 1: "
            "bad_words bans 100",
        ),
    ],
)
def test_parameters_that_leave_no_token_are_refused(
    fields: dict[str, Any], field: str, reason: str
) -> None:
    request = dataclasses.replace(REQUEST, eos_token_id=0, task=Generate(SamplingParams(**fields)))
    with pytest.raises(InvalidRequestError) as caught:
        validate_engine_core_request(request, dataclasses.replace(INFO))
    assert (caught.value.message, caught.value.field) == (reason, field)


def test_a_bias_is_no_ban_and_min_tokens_bans_no_longer_than_it_says() -> None:
    for params in (
        SamplingParams(allowed_token_ids=(5,), logit_bias={5: -100.0}),
        SamplingParams(allowed_token_ids=(0,)),
        SamplingParams(allowed_token_ids=(0, 5), min_tokens=3),
        SamplingParams(allowed_token_ids=(5,), bad_words_token_ids=((5, 5),)),
        SamplingParams(ignore_eos=True, allowed_token_ids=(0,)),
    ):
        validate_choice(params, eos_token_id=0, vocab_size=100)
