"""No field of a request is ignored: each one is served, or refused by its name."""

import dataclasses

import pytest

from pdserve_common.errors import AdapterNotHeldError, InvalidRequestError
from pdserve_common.limits.request_validation import validate_engine_core_request
from pdserve_common.limits.validation import validate_sampling_params
from pdserve_common.types import engine as types
from pdserve_common.types.capabilities import Capabilities, check_served
from pdserve_common.types.sampling_params import SamplingParams, StructuredOutputsParams
from support.engine_info import make_info

INFO = make_info()
REQUEST = types.EngineCoreRequest(
    request_id="r", prompt_token_ids=(1, 2, 3), task=types.Generate(SamplingParams())
)
# What the engine reads, or hands back as it is (trace_headers, external_req_id).
SERVED = {
    "request_id",
    "prompt_token_ids",
    # To pool: tests/common/test_pooling_params.py
    "task",
    "eos_token_id",
    "arrival_time",
    "cache_salt",
    "client_index",
    "priority",
    "trace_headers",
    "external_req_id",
    "kv_transfer_params",
    "attempt",
    "resume_output_token_ids",
    "deadline",
    "fork_of",
    "prediction_token_ids",
    "client_id",
    "data_parallel_rank",
}
REFUSED = {
    "mm_features": (
        types.MultiModalFeatureSpec(modality="image", identifier="i", position=0, length=1),
    ),
    "prompt_embeds": types.TensorRef(content_hash=b"h", dtype="float32", shape=(3, 4)),
    "prompt_is_token_ids": (True, True, True),
    "current_wave": 1,
    "resumable": True,
    "reasoning_ended": False,
    "reasoning_parser_kwargs": {"k": "v"},
}


def test_each_field_is_served_or_refused() -> None:
    names = {field.name for field in dataclasses.fields(types.EngineCoreRequest)}
    assert names == SERVED | REFUSED.keys() | {"lora_request"}
    assert not SERVED & REFUSED.keys()


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_that_is_not_served_is_refused_by_name(name: str) -> None:
    request = dataclasses.replace(REQUEST, **{name: REFUSED[name]})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match=f"{name} is set: not served yet") as error:
        validate_engine_core_request(request, INFO)
    assert error.value.field == name


def test_a_rank_takes_requests_for_itself_and_for_any() -> None:
    info = make_info(data_parallel_size=3, data_parallel_rank=1)
    for rank in (None, 1):
        validate_engine_core_request(dataclasses.replace(REQUEST, data_parallel_rank=rank), info)
    request = dataclasses.replace(REQUEST, data_parallel_rank=2)
    with pytest.raises(InvalidRequestError, match="data_parallel_rank is 2, this is rank 1 of 3"):
        validate_engine_core_request(request, info)


SERVING = Capabilities(
    adapters=frozenset(("1234",)),
    modalities=frozenset(("image", "audio")),
    fields=frozenset(REFUSED) - {"mm_features"},
)


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_is_served_by_a_worker_that_can(name: str) -> None:
    request = dataclasses.replace(REQUEST, **{name: REFUSED[name]})  # type: ignore[arg-type]
    check_served(request, SERVING)
    for fewer in (Capabilities(), Capabilities.shared([SERVING, Capabilities()])):
        with pytest.raises(InvalidRequestError, match=f"{name} is set: not served yet"):
            check_served(request, fewer)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (
            "mm_features",
            (types.MultiModalFeatureSpec(modality="video", identifier="i", position=0, length=1),),
        ),
    ],
)
def test_what_is_served_depends_on_the_value(name: str, value: object) -> None:
    request = dataclasses.replace(REQUEST, **{name: value})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError) as error:
        check_served(request, SERVING)
    assert error.value.field == name


def test_an_adapter_is_served_by_who_holds_its_digest() -> None:
    for name, digest in (("a", "1234"), ("b", "1234")):
        lora = types.LoRARequest(lora_name=name, digest=digest)
        request = dataclasses.replace(REQUEST, lora_request=lora)
        check_served(request, SERVING)
        with pytest.raises(AdapterNotHeldError, match=f"adapter '{name}'") as refusal:
            validate_engine_core_request(request, INFO)
        error = refusal.value.to_engine_error()
        assert error.code is types.ErrorCode.FAILED_PRECONDITION
        assert error.is_retryable
        assert error.fault is types.ErrorFault.WORKER
    other = types.LoRARequest(lora_name="a", digest="12345")
    with pytest.raises(AdapterNotHeldError):
        check_served(dataclasses.replace(REQUEST, lora_request=other), SERVING)


@pytest.mark.parametrize(
    "constraint", [field.name for field in dataclasses.fields(StructuredOutputsParams)]
)
def test_every_grammar_is_refused(constraint: str) -> None:
    value = {"choice": ("a",), "json_object": True}.get(constraint, "a")
    grammar = StructuredOutputsParams(**{constraint: value})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="structured_outputs is set: not served yet"):
        validate_sampling_params(SamplingParams(structured_outputs=grammar), vocab_size=9)


@pytest.mark.parametrize(
    ("headers", "refusal"),
    [
        ({str(i): "" for i in range(9)}, "trace_headers has 9 headers, at most 8"),
        ({"tracestate": "x" * 513}, "trace_headers has a text of 513 characters, at most 512"),
        ({"x" * 513: ""}, "trace_headers has a text of 513 characters, at most 512"),
    ],
)
def test_what_is_handed_back_is_bounded(headers: dict[str, str], refusal: str) -> None:
    fitting = {str(i): "x" * 512 for i in range(8)}
    validate_engine_core_request(dataclasses.replace(REQUEST, trace_headers=fitting), INFO)
    with pytest.raises(InvalidRequestError, match=refusal):
        validate_engine_core_request(dataclasses.replace(REQUEST, trace_headers=headers), INFO)
