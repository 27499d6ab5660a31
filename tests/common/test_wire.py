"""Everything that crosses a network survives the trip: every field of every dataclass."""

import dataclasses
import time
from typing import Any

import pytest

from pdserve.v1 import engine_core_pb2 as core_pb2
from pdserve.v1 import kv_transfer_service_pb2 as kv_pb2
from pdserve_common import engine_types as types
from pdserve_common import kv_types, wire
from pdserve_common.errors import InvalidRequestError

PARAMS = types.SamplingParams(
    n=2,
    best_of=3,
    presence_penalty=0.5,
    frequency_penalty=-0.5,
    repetition_penalty=1.25,
    temperature=0.5,
    top_p=0.75,
    top_k=7,
    min_p=0.125,
    seed=2**64 - 1,
    use_beam_search=True,
    length_penalty=0.5,
    early_stopping=types.EarlyStopping.NEVER,
    stop=("a", "b"),
    stop_token_ids=(1, 2),
    include_stop_str_in_output=True,
    ignore_eos=True,
    max_tokens=9,
    min_tokens=3,
    logprobs=0,
    prompt_logprobs=4,
    detokenize=False,
    skip_special_tokens=False,
    spaces_between_special_tokens=False,
    logits_processors=("x",),
    bad_words=("bad",),
    logit_bias={5: -1.5},
    allowed_token_ids=(8,),
    structured_outputs=types.StructuredOutputsParams(choice=("yes", "no")),
    repetition_detection=types.RepetitionDetectionParams(
        max_pattern_size=4, min_pattern_size=2, min_count=3
    ),
    bad_words_token_ids=((1, 2), (3,)),
    output_kind=types.RequestOutputKind.CUMULATIVE,
)
REF = types.TensorRef(content_hash=b"\x01" * 32, dtype="bfloat16", shape=(2, 3))
REQUEST = types.EngineCoreRequest(
    request_id="r",
    prompt_token_ids=(1, 2, 3),
    sampling_params=PARAMS,
    eos_token_id=0,
    mm_features=(
        types.MultiModalFeatureSpec(
            modality="image", identifier="i", position=1, length=2, data=REF
        ),
    ),
    lora_request=types.LoRARequest(lora_name="l", lora_int_id=1, lora_path="/l"),
    cache_salt="",
    data_parallel_rank=0,
    prompt_embeds=REF,
    prompt_is_token_ids=(True, False, True),
    client_index=3,
    current_wave=4,
    priority=-5,
    trace_headers={"traceparent": "00-1"},
    resumable=True,
    external_req_id="e",
    reasoning_ended=False,
    reasoning_parser_kwargs={"k": "v"},
    kv_transfer_params=types.KVTransferParams(
        do_remote_decode=True,
        do_remote_prefill=True,
        remote_engine_id="d",
        remote_host="h",
        remote_port=5,
    ),
    attempt=6,
    resume_output_token_ids=(7, 8),
    deadline=0.0,
    fork_of="parent",
)
LOGPROBS = types.LogprobsLists(
    logprob_token_ids=((1, 2), (3, 4)),
    logprobs=((-0.5, -1.0), (-2.0, -4.0)),
    sampled_token_ranks=(1, 9),
)
ERROR = types.EngineError(
    code=types.ErrorCode.OVERLOADED,
    message="full",
    is_retryable=True,
    retry_after_ms=0,
    fault=types.ErrorFault.PEER,
)
OUTPUT = types.EngineCoreOutput(
    request_id="r",
    new_token_ids=(1, 2),
    new_logprobs=LOGPROBS,
    new_prompt_logprobs=LOGPROBS,
    pooling_output=(0.5, 0.25),
    finish_reason=types.FinishReason.ERROR,
    stop_reason="stop",
    events=(types.EngineCoreEvent(types.EngineCoreEventType.KV_LOST, 2.5),),
    kv_transfer_params=types.KVTransferParams(do_remote_decode=True),
    trace_headers={"a": "b"},
    prefill_stats=types.PrefillStats(
        num_prompt_tokens=5, num_cached_tokens=4, queue_s=0.5, prefill_s=0.25, decode_queue_s=0.125
    ),
    kv_transfer_stats=types.KVTransferStats(
        num_bytes=1,
        num_blocks=2,
        num_reads=3,
        transport="shm",
        transfer_s=0.25,
        exposed_s=1.0,
        release_ack_s=0.125,
        decode_admit_s=0.5,
        first_decode_step_s=2.0,
    ),
    kv_lost=types.KVLost(num_confirmed_tokens=7, reason="stall", message="m"),
    routed_experts=(3,),
    num_nans_in_logits=4,
    attempt=5,
    first_token_index=6,
    error=ERROR,
)
STATS = types.SchedulerStats(
    **{
        field.name: index + 1
        for index, field in enumerate(dataclasses.fields(types.SchedulerStats))
    }
)
OUTPUTS = types.EngineCoreOutputs(
    outputs=(OUTPUT,),
    engine_index=1,
    scheduler_stats=STATS,
    timestamp=2.5,
    utility_output=types.UtilityOutput(call_id=1, failure_message="f", result="r"),
    finished_requests=frozenset({"x", "y"}),
    wave_complete=0,
    start_wave=1,
    engine_dead=ERROR,
)
INFO = types.EngineInfo(
    engine_id="e",
    epoch="f",
    role=types.WorkerRole.DECODE,
    model="m",
    max_model_len=1,
    vocab_size=2,
    eos_token_ids=(0, 3),
    block_size=4,
    num_blocks=5,
    max_num_seqs=6,
    max_num_batched_tokens=7,
    dtype="float32",
    kv_compatibility_hash="h",
    kv_transport="shm",
    determinism="exact",
    numerics_id="n",
    version="v",
    logits_processors=("x", "y"),
    kernels="cpu/avx2",
    has_prefix_caching=False,
    tokenizer_digest="t",
    weights_digest="w",
    started_at_ms=8,
)


def assert_every_field_is_set(value: Any, *, except_for: tuple[str, ...] = ()) -> None:
    """A round trip proves nothing about a field that has its default."""
    for field in dataclasses.fields(value):
        default = field.default
        if field.default_factory is not dataclasses.MISSING and field.name not in (
            "arrival_time",
            "timestamp",
        ):
            default = field.default_factory()
        if field.name not in except_for:
            assert getattr(value, field.name) != default, f"{field.name} has its default"


def test_sampling_params_survive() -> None:
    assert_every_field_is_set(PARAMS)
    assert wire.sampling_params_from_proto(wire.sampling_params_to_proto(PARAMS)) == PARAMS


def test_default_sampling_params_survive_and_take_no_optional_field() -> None:
    message = wire.sampling_params_to_proto(types.SamplingParams())
    assert wire.sampling_params_from_proto(message) == types.SamplingParams()
    assert wire.sampling_params_from_proto(core_pb2.SamplingParams()) == types.SamplingParams()


@pytest.mark.parametrize("constraint", ["json_schema", "regex", "grammar"])
def test_each_grammar_survives(constraint: str) -> None:
    params = types.SamplingParams(
        structured_outputs=types.StructuredOutputsParams(**{constraint: "x"})
    )
    assert wire.sampling_params_from_proto(wire.sampling_params_to_proto(params)) == params


def test_a_request_survives_with_its_times_as_durations() -> None:
    now = time.monotonic()
    sent = dataclasses.replace(REQUEST, arrival_time=now - 3000.0, deadline=now + 5000.0)
    assert_every_field_is_set(sent, except_for=("pooling_params",))
    message = wire.engine_core_request_to_proto(sent)
    assert 3000 <= message.age_ns / 1e9 < 3100
    assert 4900 < message.timeout_ns / 1e9 <= 5000
    received = wire.engine_core_request_from_proto(message)
    assert received.arrival_time == pytest.approx(sent.arrival_time, abs=100)
    assert received.deadline == pytest.approx(sent.deadline, abs=100)
    same_times = dataclasses.replace(
        received, arrival_time=sent.arrival_time, deadline=sent.deadline
    )
    assert same_times == sent


def test_a_pooling_request_survives() -> None:
    params = types.PoolingParams(task="embed", dimensions=5, normalize=False)
    sent = types.EngineCoreRequest(request_id="r", prompt_token_ids=(1,), pooling_params=params)
    received = wire.engine_core_request_from_proto(wire.engine_core_request_to_proto(sent))
    assert received.pooling_params == params


def test_a_request_without_params_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="neither sampling_params nor pooling_params"):
        wire.engine_core_request_from_proto(core_pb2.EngineCoreRequest(request_id="r"))


def test_outputs_survive() -> None:
    assert_every_field_is_set(OUTPUT)
    assert_every_field_is_set(OUTPUTS)
    assert (
        wire.engine_core_outputs_from_proto(wire.engine_core_outputs_to_proto(OUTPUTS)) == OUTPUTS
    )


def test_a_stop_token_and_a_stop_string_stay_apart() -> None:
    for stop_reason in (0, "0"):
        output = types.EngineCoreOutput(request_id="r", stop_reason=stop_reason)
        message = wire.engine_core_output_to_proto(output)
        assert wire.engine_core_output_from_proto(message) == output


def test_an_unknown_enum_value_is_refused_by_name() -> None:
    message = core_pb2.EngineCoreOutput(request_id="r", finish_reason=99)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="finish_reason is 99, known values are 1"):
        wire.engine_core_output_from_proto(message)


def test_an_unknown_reason_for_the_end_of_a_session_is_one_without_a_name() -> None:
    proto = kv_pb2.SessionEnded(request_id="r", reason=99)  # type: ignore[arg-type]
    ended = wire.kv_link_response_from_proto(kv_pb2.KvLinkResponse(session_ended=proto))
    assert isinstance(ended, kv_types.SessionEnded)
    assert ended.reason is kv_types.SessionEndReason.UNSPECIFIED


def test_logprobs_go_with_the_text_of_their_tokens_if_it_is_known() -> None:
    plain = wire.logprobs_to_proto(LOGPROBS)
    assert [list(position.decoded_tokens) for position in plain.positions] == [[], []]
    message = wire.logprobs_to_proto(LOGPROBS, token_text="t{}".format)
    assert [list(p.decoded_tokens) for p in message.positions] == [["t1", "t2"], ["t3", "t4"]]
    assert wire.logprobs_from_proto(message) == LOGPROBS


def test_worker_descriptions_survive() -> None:
    assert_every_field_is_set(INFO)
    assert wire.engine_info_from_proto(wire.engine_info_to_proto(INFO)) == INFO


SESSION = kv_types.KVSessionId(p_epoch="p", d_epoch="d", link=1, seq=2)
LAYOUT = kv_types.KVLayout(
    groups=(kv_types.KVGroup(id=1, layers=(0, 2), kind=kv_types.KVGroupKind.SLIDING, window=128),),
    block_size=16,
    block_bytes=1024,
    tile_format="vnni",
)
ENDPOINT = kv_types.KVEndpoint(
    nixl_metadata=b"\0\xff",
    memory_type="DRAM",
    regions=(
        kv_types.KVMemoryRegion(base_address=2**47, first_block=1, num_blocks=2, device_id=3),
    ),
    transport="shm",
)


@pytest.mark.parametrize(
    "message",
    [
        kv_types.KVLinkHello(
            min_protocol_version=1,
            max_protocol_version=2,
            engine_id="e",
            epoch="f",
            compatibility_hash="h",
            layout=LAYOUT,
            connector="nixl",
        ),
        kv_types.Granted(session=SESSION, first_block=2),
        kv_types.Later(session=SESSION),
        kv_types.Revoke(session=SESSION),
        kv_types.CancelRequest(request_id="r", attempt=1, reason="x"),
        kv_types.Release(session=SESSION, through_block=3),
        kv_types.KVLinkHeartbeat(step_seq=4),
    ],
)
def test_kv_link_requests_survive(message: kv_types.KVLinkRequestMessage) -> None:
    assert wire.kv_link_request_from_proto(wire.kv_link_request_to_proto(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        kv_types.KVLinkWelcome(
            protocol_version=1,
            engine_id="e",
            epoch="f",
            compatibility_hash="h",
            link=7,
            endpoint=ENDPOINT,
        ),
        kv_types.GrantRequest(session=SESSION, request_id="r", attempt=1, num_tokens=33),
        kv_types.BlocksReady(session=SESSION, first_block=2, block_ids=((5, 6), (7, 8))),
        kv_types.BlocksReady(
            session=SESSION, first_block=2, block_ids=((5, 6),), checksums=((9, 2**32 - 1),)
        ),
        kv_types.PrefillDone(session=SESSION, num_tokens=33, output_token_ids=(9,), timeout_s=1.5),
        kv_types.ReleaseAck(session=SESSION, through_block=3, valid=True),
        kv_types.SessionEnded(
            session=SESSION,
            request_id="r",
            attempt=1,
            reason=kv_types.SessionEndReason.FENCED,
            message="fenced: sleep",
        ),
        kv_types.SessionEnded(
            session=None,
            request_id="r",
            attempt=1,
            reason=kv_types.SessionEndReason.UNSPECIFIED,
            message="",
        ),
        kv_types.KVLinkHeartbeat(step_seq=4),
    ],
)
def test_kv_link_responses_survive(message: kv_types.KVLinkResponseMessage) -> None:
    assert wire.kv_link_response_from_proto(wire.kv_link_response_to_proto(message)) == message


def test_empty_kv_link_messages_are_refused() -> None:
    with pytest.raises(InvalidRequestError):
        wire.kv_link_request_from_proto(kv_pb2.KvLinkRequest())
    with pytest.raises(InvalidRequestError):
        wire.kv_link_response_from_proto(kv_pb2.KvLinkResponse())


@pytest.mark.parametrize("code", types.ErrorCode)
def test_every_error_is_somebodys_fault_also_of_a_sender_that_does_not_say(
    code: types.ErrorCode,
) -> None:
    error = types.EngineError(code=code, message="m")
    message = wire.engine_error_to_proto(error)
    assert message.fault in (1, 2, 3)
    message.ClearField("fault")
    assert wire.engine_error_from_proto(message) == error
