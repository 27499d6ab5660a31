"""Everything that crosses a network survives the trip: every field of every dataclass."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from enum import IntEnum
from functools import partial
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints
from unittest import mock

import msgspec
import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from pdserve.v1 import engine_core_pb2 as core_pb2
from pdserve.v1 import engine_core_service_pb2 as service_pb2
from pdserve.v1 import kv_transfer_service_pb2 as kv_pb2
from pdserve_common import wire
from pdserve_common.errors import InvalidRequestError
from pdserve_common.limits.validation import validate_sampling_params
from pdserve_common.types import engine as types
from pdserve_common.types import kv as kv_types
from pdserve_common.types.sampling_params import SamplingParams, StructuredOutputsParams
from pdserve_common.wire import codec

# What time.monotonic() says while generated values cross. Seconds are multiples of 1/8: nanoseconds
# keep them.
NOW = 2.0**20
SECONDS = st.integers(0, 2**20).map(lambda eighths: eighths / 8)
SCALARS: Mapping[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: st.integers(0, 2**31 - 1),
    float: st.floats(width=32, allow_nan=False),
    str: st.text(st.characters(exclude_categories=("Cs",)), max_size=5),
    bytes: st.binary(max_size=5),
    NoneType: st.none(),
}
INTS = st.lists(SCALARS[int], max_size=3).map(tuple)
FLOATS = st.lists(SCALARS[float], max_size=3).map(tuple)
SIGNED = st.integers(-(2**31), 2**31 - 1)
FIELDS: Mapping[str, st.SearchStrategy[Any]] = {
    "arrival_time": SECONDS.map(lambda age: NOW - age),
    "deadline": st.none() | SECONDS.map(lambda remaining: NOW + remaining),
    "timestamp": SECONDS,
    "priority": SIGNED,
    "top_k": SIGNED,
    "seed": st.none() | st.integers(0, 2**64 - 1),
    # None and nothing are one to the wire.
    "pooling_output": st.none() | FLOATS.filter(bool),
    # Of a worker that tells none it is known.
    "tasks": st.sampled_from((("generate",), ("embed",), ("classify", "score"))),
}
# Fields of messages that no dataclass has.
NO_FIELDS = {"EngineCoreOutputs": {"step_seq", "more", "tokens"}}
LOGPROBS = types.LogprobsLists(
    logprob_token_ids=((1, 2), (3, 4)),
    logprobs=((-0.5, -1.0), (-2.0, -4.0)),
    sampled_token_ranks=(1, 9),
)


def is_record(cls: object) -> bool:
    is_struct = isinstance(cls, type) and issubclass(cls, msgspec.Struct)
    return is_struct or dataclasses.is_dataclass(cls)


def values(hint: Any, field: str = "") -> st.SearchStrategy[Any]:
    """Any value of a type; a new field is tried without a word here."""
    if field in FIELDS:
        return FIELDS[field]
    if hint is float and field.endswith("_s"):
        return SECONDS
    if hint in SCALARS:
        return SCALARS[hint]
    if is_record(hint):
        return DEPENDENT[hint]() if hint in DEPENDENT else built(hint)
    if isinstance(hint, type) and issubclass(hint, IntEnum):
        return st.sampled_from(hint)
    origin, args = get_origin(hint), get_args(hint)
    if origin is Mapping:
        return st.dictionaries(*map(values, args), max_size=3)
    if origin in (tuple, frozenset):
        return st.lists(values(args[0]), max_size=3).map(origin)
    return st.one_of(*map(values, args))


def built(cls: Any, **given: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    hints = get_type_hints(cls).items()
    return st.builds(cls, **{name: values(hint, name) for name, hint in hints} | given)


def a_grammar() -> st.SearchStrategy[StructuredOutputsParams]:
    choice = st.lists(SCALARS[str], min_size=1, max_size=3).map(tuple)
    texts = dict.fromkeys(("json_schema", "regex", "grammar", "structural_tag"), SCALARS[str])
    others = {"choice": choice, "json_object": st.just(True)}
    return st.one_of(
        st.builds(StructuredOutputsParams, **{name: one}) for name, one in (texts | others).items()
    )


def any_logprobs() -> st.SearchStrategy[types.LogprobsLists]:
    names = [field.name for field in dataclasses.fields(types.LogprobsLists)]
    positions = st.lists(st.tuples(INTS, FLOATS, SCALARS[int]), max_size=3)
    columns = positions.map(lambda rows: tuple(zip(*rows, strict=True)) or ((), (), ()))
    return columns.map(
        lambda columns: types.LogprobsLists(**dict(zip(names, columns, strict=True)))
    )


def announced_blocks() -> st.SearchStrategy[kv_types.BlocksReady]:
    """With a checksum for each block, or without any."""
    ids = st.lists(INTS, max_size=3).map(tuple)
    plain = built(kv_types.BlocksReady, block_ids=ids, checksums=st.just(()))
    return plain | plain.filter(lambda ready: any(ready.block_ids)).map(
        lambda ready: dataclasses.replace(ready, checksums=ready.block_ids)
    )


def an_endpoint() -> st.SearchStrategy[kv_types.KVRankEndpoint]:
    return built(kv_types.KVRankEndpoint, shard=values(kv_types.KVShard))


def a_welcome() -> st.SearchStrategy[kv_types.KVLinkWelcome]:
    """Of version 4 and later, with any ranks, or of an earlier one."""
    versions = st.integers(kv_types.RANKS_PROTOCOL_VERSION, 2**32 - 1)
    old_rank = built(kv_types.KVRankEndpoint, rank=st.just(0), shard=st.none())
    old_endpoint = built(kv_types.KVEndpoint, ranks=st.tuples(old_rank))
    return built(kv_types.KVLinkWelcome, protocol_version=versions) | built(
        kv_types.KVLinkWelcome, protocol_version=st.just(3), endpoint=old_endpoint
    )


DEPENDENT: Mapping[Any, Callable[[], st.SearchStrategy[Any]]] = {
    StructuredOutputsParams: a_grammar,
    types.LogprobsLists: any_logprobs,
    kv_types.BlocksReady: announced_blocks,
    kv_types.KVRankEndpoint: an_endpoint,
    kv_types.KVLinkWelcome: a_welcome,
}
BY_HAND = {
    types.LogprobsLists: (wire.logprobs_to_proto, wire.logprobs_from_proto),
    types.EngineCoreOutput: (wire.engine_core_output_to_proto, wire.engine_core_output_from_proto),
    types.EngineCoreOutputs: (
        wire.engine_core_outputs_to_proto,
        wire.engine_core_outputs_from_proto,
    ),
}
KV_REQUEST = (wire.kv_link_request_to_proto, wire.kv_link_request_from_proto)
KV_RESPONSE = (wire.kv_link_response_to_proto, wire.kv_link_response_from_proto)
KV_LINK = [
    *((cls, *KV_REQUEST) for cls in get_args(kv_types.KVLinkRequestMessage)),
    *((cls, *KV_RESPONSE) for cls in get_args(kv_types.KVLinkResponseMessage)),
]
# These cross as parts of others only.
PARTS = (
    types.Generate,
    types.Pool,
    types.EngineCoreEvent,
    kv_types.KVEndpoint,
    kv_types.KVShard,
)
ENGINE = [
    (cls, *BY_HAND.get(cls, (wire.to_proto, partial(wire.from_proto, cls))))
    for cls in (*vars(types).values(), *vars(kv_types).values())
    if is_record(cls) and cls not in (*PARTS, *(cls for cls, _, _ in KV_LINK))
]


@pytest.mark.parametrize(
    ("cls", "write", "read"), ENGINE + KV_LINK, ids=lambda value: getattr(value, "__name__", "")
)
def test_every_field_survives(cls: Any, write: Any, read: Any) -> None:
    expected, seen = set(), set()

    @given(values(cls))
    def target(value: Any) -> None:
        with mock.patch.object(codec.time, "monotonic", return_value=NOW):
            message = write(value)
            assert read(message) == value
        if (cls, write, read) in KV_LINK:
            message = getattr(message, message.WhichOneof("message"))
        expected.update(message.DESCRIPTOR.fields_by_name)
        seen.update(field.name for field, _ in message.ListFields())

    target()
    assert seen == expected - NO_FIELDS.get(cls.__name__, set())


def test_every_message_of_the_kv_link_has_its_dataclass() -> None:
    for message, kinds in (
        (kv_pb2.KvLinkRequest, kv_types.KVLinkRequestMessage),
        (kv_pb2.KvLinkResponse, kv_types.KVLinkResponseMessage),
    ):
        assert len(message.DESCRIPTOR.fields) == len(get_args(kinds))


REGION = kv_types.KVMemoryRegion(base_address=1 << 40, first_block=0, num_blocks=9)
WELCOME = kv_types.KVLinkWelcome(
    protocol_version=3,
    engine_id="p0",
    epoch="e",
    compatibility_hash="h",
    link=2,
    endpoint=kv_types.KVEndpoint(
        ranks=(kv_types.KVRankEndpoint(memory_type="DRAM", regions=(REGION,), nixl_metadata=b"m"),),
        transport="shm",
    ),
)
# What a worker of protocol version 3 has sent.
HELLO_OF_VERSION_3 = (
    "0a2f080310031a026430220265322a016832180a0612020001180110101880402209726f775f6d616a6f723a04"
    "6e69786c"
)
WELCOME_OF_VERSION_3 = (
    "0a270803120270301a0165220168280232016d3a044452414d42090880808080802018094a0373686d"
)


def test_what_version_3_sent_is_still_understood() -> None:
    response = kv_pb2.KvLinkResponse.FromString(bytes.fromhex(WELCOME_OF_VERSION_3))
    assert wire.kv_link_response_from_proto(response) == WELCOME
    request = kv_pb2.KvLinkRequest.FromString(bytes.fromhex(HELLO_OF_VERSION_3))
    group = kv_types.KVGroup(id=0, layers=(0, 1), kind=kv_types.KVGroupKind.FULL)
    assert wire.kv_link_request_from_proto(request) == kv_types.KVLinkHello(
        min_protocol_version=3,
        max_protocol_version=3,
        engine_id="d0",
        epoch="e2",
        compatibility_hash="h",
        layout=kv_types.KVLayout(
            groups=(group,), block_size=16, block_bytes=8192, num_kv_heads=0, head_bytes=0
        ),
        connector="nixl",
    )


def test_version_3_finds_an_only_rank_where_it_looks() -> None:
    shard = kv_types.KVShard(first_kv_head=0, num_kv_heads=2, first_slot=0, num_slots=4)
    (rank,) = WELCOME.endpoint.ranks
    endpoint = dataclasses.replace(
        WELCOME.endpoint, ranks=(dataclasses.replace(rank, shard=shard),)
    )
    sent = dataclasses.replace(WELCOME, endpoint=endpoint)
    message = wire.kv_link_response_to_proto(sent)
    assert [rank.num_kv_heads for rank in message.welcome.ranks] == [2]
    message.welcome.ClearField("ranks")
    assert message.SerializeToString().hex() == WELCOME_OF_VERSION_3


def test_only_one_rank_stands_where_version_3_looks() -> None:
    endpoint = dataclasses.replace(WELCOME.endpoint, ranks=WELCOME.endpoint.ranks * 2)
    sent = dataclasses.replace(WELCOME, protocol_version=4, endpoint=endpoint)
    message = wire.kv_link_response_to_proto(sent).welcome
    assert len(message.ranks) == 2
    assert not message.nixl_metadata + message.memory_type.encode()
    assert not message.regions


def test_a_field_that_the_message_lacks_is_named() -> None:
    made = dataclasses.make_dataclass("TensorRef", [("dtype", str), ("device", str)])
    with pytest.raises(TypeError, match=r"TensorRef\.device has no field in the message"):
        codec.Codec(made, core_pb2.TensorRef)


def test_a_type_without_a_rule_is_named() -> None:
    made = dataclasses.make_dataclass("TensorRef", [("shape", list[int])])
    with pytest.raises(TypeError, match=r"shape is a list.*no conversion is known"):
        codec.Codec(made, core_pb2.TensorRef)


def test_none_is_refused_where_it_says_nothing() -> None:
    assert not wire.to_proto(SamplingParams(n=None)).HasField("n")
    with pytest.raises(TypeError, match=r"SamplingParams\.stop is None"):
        wire.to_proto(SamplingParams(stop=None))


def test_default_sampling_params_are_those_of_an_empty_message() -> None:
    assert wire.from_proto(SamplingParams, core_pb2.SamplingParams()) == SamplingParams()


def test_a_request_survives_with_its_times_as_durations() -> None:
    now = time.monotonic()
    sent = types.EngineCoreRequest(
        request_id="r",
        prompt_token_ids=(1, 2, 3),
        task=types.Generate(SamplingParams()),
        arrival_time=now - 3000.0,
        deadline=now + 5000.0,
    )
    message = wire.to_proto(sent)
    assert 3000 <= message.age_ns / 1e9 < 3100
    assert 4900 < message.timeout_ns / 1e9 <= 5000
    received = wire.from_proto(types.EngineCoreRequest, message)
    assert received.arrival_time == pytest.approx(sent.arrival_time, abs=100)
    assert received.deadline == pytest.approx(sent.deadline, abs=100)
    same_times = dataclasses.replace(
        received, arrival_time=sent.arrival_time, deadline=sent.deadline
    )
    assert same_times == sent


def test_a_request_without_params_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="neither sampling_params nor pooling_params"):
        wire.from_proto(types.EngineCoreRequest, core_pb2.EngineCoreRequest(request_id="r"))


def test_a_parameter_of_the_reasoning_parser_comes_once() -> None:
    message = core_pb2.EngineCoreRequest(request_id="r", sampling_params=core_pb2.SamplingParams())
    for value in ("a", "b"):
        message.reasoning_parser_kwargs.add(name="n", value=value)
    with pytest.raises(InvalidRequestError, match="has a name more than once") as caught:
        wire.from_proto(types.EngineCoreRequest, message)
    assert caught.value.field == "reasoning_parser_kwargs"


def test_an_empty_grammar_is_refused() -> None:
    empty = core_pb2.SamplingParams(structured_outputs=core_pb2.StructuredOutputsParams())
    with pytest.raises(InvalidRequestError, match="structured_outputs is empty, set one of"):
        wire.from_proto(SamplingParams, empty)


def test_no_json_object_is_no_constraint() -> None:
    no_object = core_pb2.StructuredOutputsParams(json_object=False)
    read = wire.from_proto(StructuredOutputsParams, no_object)
    assert read == StructuredOutputsParams()
    params = SamplingParams(structured_outputs=read)
    with pytest.raises(InvalidRequestError, match="structured_outputs has 0 constraints"):
        validate_sampling_params(params, vocab_size=9)


def test_a_stop_token_and_a_stop_string_stay_apart() -> None:
    for stop_reason in (0, "0"):
        output = types.EngineCoreOutput(request_id="r", stop_reason=stop_reason)
        message = wire.engine_core_output_to_proto(output)
        assert wire.engine_core_output_from_proto(message) == output


@pytest.mark.parametrize(
    ("read", "message", "field"),
    [
        (
            wire.engine_core_output_from_proto,
            core_pb2.EngineCoreOutput(finish_reason=99),  # type: ignore[arg-type]
            "finish_reason",
        ),
        (
            partial(wire.from_proto, SamplingParams),
            core_pb2.SamplingParams(early_stopping=99),  # type: ignore[arg-type]
            "sampling_params.early_stopping",
        ),
        (
            partial(wire.from_proto, types.EngineError),
            core_pb2.EngineError(code=99),  # type: ignore[arg-type]
            "error.code",
        ),
        (partial(wire.from_proto, types.EngineInfo), service_pb2.EngineInfo(), "info.role"),
        (
            partial(wire.from_proto, kv_types.KVLayout),
            kv_pb2.KvLayout(groups=[kv_pb2.KvGroup()]),
            "layout.groups.kind",
        ),
    ],
)
def test_an_unknown_enum_value_is_refused_by_name(
    read: Callable[[Message], object], message: Message, field: str
) -> None:
    with pytest.raises(InvalidRequestError, match=rf"{field} is \d+, known values are 1") as caught:
        read(message)
    assert caught.value.field == field


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
    message = wire.to_proto(error)
    assert message.fault in (1, 2, 3)
    message.ClearField("fault")
    assert wire.from_proto(types.EngineError, message) == error


COLUMNS = ("request_id", "attempt", "new_token_ids", "first_token_index")
TOKENS = types.EngineCoreOutput(
    request_id="a", attempt=2, new_token_ids=(5, 6), first_token_index=7
)


def written(*outputs: types.EngineCoreOutput, handle: int = 9) -> tuple[list[Any], list[Any]]:
    """Return the columns' rows and the other outputs of a step."""
    step = types.EngineCoreOutputs(outputs=outputs)
    message = wire.engine_core_outputs_to_proto(step, handles={("a", 2): handle})
    columns = message.tokens
    rows = zip(columns.handles, columns.token_ids, columns.token_indexes, strict=True)
    return list(rows), list(wire.engine_core_outputs_from_proto(message).outputs)


@given(st.data())
def test_only_tokens_that_come_alone_are_columns(data: st.DataObject) -> None:
    """Whatever else a field says, one of the future among them, comes as it is."""
    hints = get_type_hints(types.EngineCoreOutput)
    name = data.draw(st.sampled_from(sorted(hints.keys() - set(COLUMNS))))
    value = data.draw(values(hints[name], name))
    output = msgspec.structs.replace(TOKENS, **{name: value})
    rows, others = written(output)
    is_alone = output == TOKENS
    assert rows == ([(9, 5, 7), (9, 6, 8)] if is_alone else [])
    assert others == ([] if is_alone else [output])


def test_tokens_of_an_attempt_without_a_handle_are_no_columns() -> None:
    other = msgspec.structs.replace(TOKENS, attempt=1)
    assert written(other) == ([], [other])


def test_the_outputs_of_a_request_stay_in_their_order() -> None:
    """Columns are read before all others."""
    whole = msgspec.structs.replace(TOKENS, first_token_index=9, num_nans_in_logits=1)
    behind = msgspec.structs.replace(TOKENS, first_token_index=11)
    rows, others = written(TOKENS, whole, behind)
    assert rows == [(9, 5, 7), (9, 6, 8)]
    assert others == [whole, behind]
