"""What does not wait for the end of a step of the engine, however long that is."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdserve_common.types.engine import EngineCoreRequest
from pdserve_common.types.kv import (
    Granted,
    GrantRequest,
    PrefillDone,
    Release,
    ReleaseAck,
    new_epoch,
)
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_engine.kv_transfer.connectors.links import make_hello
from pdserve_engine.runner import rank
from support.engines import launched
from support.local_transport import LocalRegistry, LocalTransport
from support.requests import make_request
from support.scripted_engine import ON_D, ON_P, ScriptedConsumer
from support.steps import exchange_parts, held_steps
from support.waiting import until

SETTINGS = {"kv_cache_memory_mib": 8, "engine_process": "inproc"}


def request(name: str, **fields: Any) -> EngineCoreRequest:
    return make_request(name, params=SamplingParams(max_tokens=2), **fields)


class Connector(ScriptedConsumer):
    """Notes what has come; a real one dials."""

    def __init__(self) -> None:
        super().__init__()
        self.dispatched: list[EngineCoreRequest] = []

    def on_dispatched(self, request: EngineCoreRequest) -> None:
        self.dispatched.append(request)


@contextlib.asynccontextmanager
async def long_step(engine: Any) -> AsyncIterator[None]:
    """Within it the engine is in the midst of a step."""
    with held_steps() as held:
        engine.add_request(request("local"))
        assert await asyncio.to_thread(held.has_begun.wait, 60)
        yield


async def test_the_connector_hears_of_a_request_in_the_midst_of_a_step(
    make_model: Callable[..., Path],
) -> None:
    connector = Connector()
    async with launched(make_model(), **SETTINGS) as engine:
        exchange_parts(engine, connector=connector)
        async with long_step(engine):
            ticket = request("remote", kv_transfer_params=ON_D)
            engine.add_request(ticket)
            assert connector.dispatched[-1] is ticket


class Wire:
    """What P sends to D."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def send(self, message: Any) -> None:
        self.messages.append(message)

    def close(self, reason: str) -> None:
        """Nobody listens any longer."""

    async def heard(self, kind: type) -> Any:
        await until(lambda: any(isinstance(message, kind) for message in self.messages))
        return next(message for message in self.messages if isinstance(message, kind))


async def test_p_answers_a_release_in_the_midst_of_a_step(
    make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """K4's ReleaseAck costs D no step of P. Nothing is read here: the test is D."""
    registry = LocalRegistry()
    monkeypatch.setattr(
        rank,
        "make_transport",
        lambda identity, **options: LocalTransport(identity.agent_name(), registry),
    )
    async with launched(make_model(), "prefill", **SETTINGS, kv_connector="nixl") as engine:
        connector: Any = engine.connector
        wire = Wire()
        d_identity = replace(connector.identity, engine_id=ON_P.remote_engine_id, epoch=new_epoch())
        link = connector.accept_link(make_hello(d_identity, "local"), wire)
        engine.add_request(request("remote", kv_transfer_params=ON_P))
        session = (await wire.heard(GrantRequest)).session
        connector.on_message(link, Granted(session=session, first_block=0))
        await wire.heard(PrefillDone)
        async with long_step(engine):
            connector.on_message(link, Release(session=session, through_block=1))
            assert wire.messages[-1] == ReleaseAck(session=session, through_block=1, valid=True)
