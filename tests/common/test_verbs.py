"""The table of verbs: an RPC for each, whose request and response are its arguments and result."""

from types import NoneType
from typing import Any

import pytest
from google.protobuf.message_factory import GetMessageClass

from pdserve.v1 import control_service_pb2 as control_pb2
from pdserve.v1 import engine_core_pb2 as core_pb2
from pdserve_common.errors import InvalidRequestError
from pdserve_common.processes.calls import Call
from pdserve_common.types.engine import PauseMode
from pdserve_common.types.lora import LoadedLoRA, LoRAAdapter, LoRARequest
from pdserve_common.types.verbs import (
    VERBS,
    AddLora,
    ListLoras,
    Pause,
    PinLora,
    Profile,
    RemoveLora,
    Resume,
    Sleep,
    UnpinLora,
    WakeUp,
)
from pdserve_common.wire import from_proto, to_proto, verb_result_to_proto

METHODS = control_pb2.DESCRIPTOR.services_by_name["ControlService"].methods_by_name
ADAPTER = LoRAAdapter(name="a", digest="d", rank=8)
LOADED = LoadedLoRA(adapter=ADAPTER, is_pinned=True, is_removed=True, num_requests=3)
RESULTS: dict[Any, Any] = {
    NoneType: None,
    int: 2**31,
    str: "path",
    LoRAAdapter: ADAPTER,
    tuple[LoadedLoRA, ...]: (LOADED,),
}


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__)
def test_every_verb_has_an_rpc_that_takes_all_its_arguments(verb: type[Call[Any]]) -> None:
    method = METHODS[verb.__name__]
    fields = verb.__dataclass_fields__  # type: ignore[attr-defined]
    assert set(method.input_type.fields_by_name) == set(fields)
    result = RESULTS[verb.result_type()]
    response = verb_result_to_proto(verb, result)
    assert isinstance(response, GetMessageClass(method.output_type))
    values = [value for _, value in response.ListFields()]
    assert list(map(_back, values)) == ([] if result is None else [result])


def _back(value: Any) -> Any:
    """What a field's value was made of."""
    if isinstance(value, core_pb2.LoraAdapter):
        return from_proto(LoRAAdapter, value)
    if isinstance(value, int | str):
        return value
    return tuple(from_proto(LoadedLoRA, each) for each in value)


@pytest.mark.parametrize(
    "verb",
    [
        Pause(mode=PauseMode.KEEP, clear_cache=True),
        Resume(),
        Sleep(level=2, mode=PauseMode.WAIT),
        WakeUp(tags=("kv_cache", "weights")),
        Profile(start=True),
        AddLora(lora_request=LoRARequest(lora_name="a", digest="", lora_path="b")),
        RemoveLora(lora_name="a"),
        ListLoras(),
        PinLora(lora_name="a"),
        UnpinLora(lora_name="a"),
    ],
)
def test_arguments_survive_the_way(verb: Call[Any]) -> None:
    assert from_proto(type(verb), to_proto(verb)) == verb


def test_what_a_request_leaves_out_has_its_default() -> None:
    assert from_proto(Pause, control_pb2.PauseRequest()) == Pause(mode=PauseMode.ABORT)
    assert from_proto(Sleep, control_pb2.SleepRequest()) == Sleep(level=0, mode=PauseMode.ABORT)
    assert from_proto(WakeUp, control_pb2.WakeUpRequest()) == WakeUp(tags=())


def test_a_verb_is_valid_or_not_made() -> None:
    for level in (-1, 3):
        with pytest.raises(InvalidRequestError, match=f"level is {level}, must be 0 to 2"):
            Sleep(level=level)
    with pytest.raises(InvalidRequestError, match="tags has 'wings', known tags are weights"):
        WakeUp(tags=("weights", "wings"))
    for name in ("", "a" * 129, "a\nb", "\N{LATIN SMALL LETTER E WITH ACUTE}"):
        with pytest.raises(InvalidRequestError, match=r"lora_name is .*, must be 1 to 128"):
            RemoveLora(lora_name=name)
        with pytest.raises(InvalidRequestError, match=r"lora_name is .*, must be 1 to 128"):
            AddLora(lora_request=LoRARequest(lora_name=name, digest=""))
    with pytest.raises(InvalidRequestError, match="mode is 9, known values are 1"):
        from_proto(Pause, control_pb2.PauseRequest(mode=9))  # type: ignore[arg-type]


def test_names_in_messages_are_words() -> None:
    assert [verb.title() for verb in (Pause, WakeUp)] == ["pause", "wake up"]
