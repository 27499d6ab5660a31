"""One KV session with everything that may go wrong, and without one of the rules K1 to K5."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

import pytest
from model_checks import fails, holds
from session_model import SessionModel
from session_world import Scope

from pdserve_engine.kv_transfer.protocol.transitions import (
    CONSUMER,
    PRODUCER,
    READ,
    ConsumerAction,
    ConsumerEvent,
    ConsumerState,
    ConsumerStep,
    ProducerAction,
    ProducerEvent,
    ProducerState,
    ProducerStep,
    ReadAction,
    ReadEvent,
    ReadState,
    ReadStep,
)

StateT = TypeVar("StateT")
EventT = TypeVar("EventT")
StepT = TypeVar("StepT")

_P, _PE, _PA = ProducerState, ProducerEvent, ProducerAction
_D, _DE, _DA = ConsumerState, ConsumerEvent, ConsumerAction

# Ends of a session by which blocks of it are freed that D may still want.
P_GIVES_UP = [
    (_P.SENDING, _PE.PREEMPTED),
    (_P.SENDING, _PE.FINISHED),
    (_P.SENDING, _PE.EXPIRED),
    (_P.SENDING, _PE.FENCED),
    (_P.HANDED_OFF, _PE.FINISHED),
    (_P.HANDED_OFF, _PE.EXPIRED),
    (_P.HANDED_OFF, _PE.FENCED),
]


# The same of a prefix: all that P does there is to keep it.
P_GIVES_PREFIX_UP = [
    (_P.HANDED_OFF, _PE.FINISHED),
    (_P.HANDED_OFF, _PE.EXPIRED),
    (_P.HANDED_OFF, _PE.FENCED),
]


def with_step(
    table: Mapping[StateT, Mapping[EventT, StepT]], state: StateT, event: EventT, step: StepT
) -> dict[StateT, Mapping[EventT, StepT]]:
    return {**table, state: {**table[state], event: step}}


@pytest.mark.parametrize("num_cached", [0, 1, 2])
@pytest.mark.parametrize("preemption", [False, True])
def test_a_request_is_served_where_nothing_goes_wrong(num_cached: int, preemption: bool) -> None:
    holds(SessionModel(Scope(num_cached=num_cached, preemption=preemption)), more_than=10)


def test_nothing_goes_wrong_when_d_is_short_of_blocks_and_p_preempts() -> None:
    holds(SessionModel(Scope(preemption=True, scarcity=True)), more_than=10_000)


@pytest.mark.parametrize("num_cached", [0, 2])
@pytest.mark.parametrize(
    "scope", [Scope(p_gives_up=True), Scope(d_gives_up=True), Scope(cuts=True)]
)
def test_when_one_side_gives_up_the_other_one_ends_without_a_deadline(
    scope: Scope, num_cached: int
) -> None:
    scope = replace(scope, preemption=True, num_cached=num_cached)
    holds(SessionModel(scope), more_than=100 if num_cached else 1_000)


def test_nothing_goes_wrong_whatever_happens() -> None:
    scope = Scope(preemption=True, restart=True, cuts=True, p_gives_up=True, d_gives_up=True)
    holds(SessionModel(scope), more_than=100_000)


def test_nothing_goes_wrong_whatever_happens_while_d_is_short_of_blocks() -> None:
    scope = Scope(scarcity=True, restart=True, cuts=True, p_gives_up=True, d_gives_up=True)
    holds(SessionModel(scope), more_than=50_000)


def test_without_k1_another_requests_session_confirms_what_was_read() -> None:
    model = SessionModel(Scope(restart=True), checks_identity=False)
    found = fails(model)
    assert "D uses chunk 0, whose block holds 'x'" in found.what
    assert found.happens("P is started anew", "the NIC copies", "P takes Release 0.0")


def test_without_k2_half_a_chunk_is_used() -> None:
    found = fails(SessionModel(Scope(), announces_after_step=False))
    assert "whose block holds '~'" in found.what
    assert found.happens("P computes chunk 0", "the NIC copies", "D takes ReleaseAck")


@pytest.mark.parametrize(("state", "event"), P_GIVES_UP)
def test_without_k3_freed_blocks_are_used(state: ProducerState, event: ProducerEvent) -> None:
    """The blocks are freed at once, and the session is ended later or never."""
    step = PRODUCER[state][event]
    freeing = tuple(a for a in step.actions if a in (_PA.FREE, _PA.FAIL_REQUEST))
    table = with_step(PRODUCER, state, event, ProducerStep(state, freeing))
    found = fails(SessionModel(Scope(preemption=True, p_gives_up=True), producer=table))
    assert "D uses chunk" in found.what
    assert found.happens("P takes Release", "D takes ReleaseAck")


def test_without_k4_what_landed_is_used_though_p_had_freed_it() -> None:
    landed = ConsumerStep(_D.PULLING, (_DA.CONFIRM,))
    table = with_step(CONSUMER, _D.PULLING, _DE.READ_LANDED, landed)
    found = fails(SessionModel(Scope(p_gives_up=True), consumer=table))
    assert "D uses chunk" in found.what
    assert found.happens("the NIC copies", "D sees chunk")


def test_without_k4_a_token_gets_out_that_was_made_of_freed_blocks() -> None:
    """D's first step may run before the ReleaseAck, its token may not get out."""
    found = fails(SessionModel(Scope(p_gives_up=True), holds_back=False))
    assert "a token of D is out that was made of" in found.what
    assert found.happens("the NIC copies", "D has all", "D runs its first step")


def test_without_k4_the_ack_of_one_chunk_lets_a_token_of_both_out() -> None:
    early = ConsumerStep(_D.ACCEPTED, (_DA.ACCEPT,))
    table = with_step(CONSUMER, _D.LANDED, _DE.CONFIRMED, early)
    found = fails(SessionModel(Scope(p_gives_up=True), consumer=table))
    assert "a token of D is out that was made of '0x'" in found.what
    assert found.happens("D has all", "D runs its first step", "D takes ReleaseAck 0.0 1")


def test_without_k4_a_release_is_valid_before_its_chunk_has_landed() -> None:
    announced = ConsumerStep(_D.PULLING, (_DA.POST_READ, _DA.SEND_RELEASE))
    table = with_step(CONSUMER, _D.GRANTED, _DE.ANNOUNCED, announced)
    found = fails(SessionModel(Scope(), consumer=table))
    assert "D uses chunk 0" in found.what
    assert found.happens("D takes BlocksReady", "P takes Release", "D takes ReleaseAck")


def test_without_k5_a_read_lands_in_another_requests_block() -> None:
    dropped = ReadStep(ReadState.OVER, (ReadAction.FREE_BLOCKS,))
    table = with_step(READ, ReadState.POSTED, ReadEvent.DROPPED, dropped)
    found = fails(SessionModel(Scope(d_gives_up=True), read=table))
    assert "which is another request's" in found.what
    assert found.happens("D takes BlocksReady", "D's request ends")


# ---- the roles turned round: D reads what P has cached


@pytest.mark.parametrize(
    "scope",
    [Scope(), Scope(p_gives_up=True), Scope(d_gives_up=True), Scope(cuts=True)],
)
def test_a_prefix_is_read_or_given_up_without_a_deadline(scope: Scope) -> None:
    holds(SessionModel(replace(scope, prefix=True)), more_than=40)


def test_a_prefix_can_be_read() -> None:
    """Which `holds` does not ask for."""
    found = fails(
        SessionModel(
            Scope(prefix=True),
            consumer=with_step(CONSUMER, _D.FETCHING, _DE.COMPLETED, ConsumerStep(_D.FETCHING)),
        )
    )
    assert found.what == "from here no good end can be reached"
    assert found.happens("P takes PrefixRequest", "P finds 1 chunks")


def test_nothing_goes_wrong_with_a_prefix_whatever_happens() -> None:
    scope = Scope(prefix=True, restart=True, cuts=True, p_gives_up=True, d_gives_up=True)
    holds(SessionModel(scope), more_than=1_000)


def test_without_k1_another_requests_session_confirms_a_prefix() -> None:
    found = fails(SessionModel(Scope(prefix=True, restart=True), checks_identity=False))
    assert "D uses chunk 0, whose block holds 'x'" in found.what


@pytest.mark.parametrize(("state", "event"), P_GIVES_PREFIX_UP)
def test_without_k3_a_prefix_is_used_that_p_had_freed(
    state: ProducerState, event: ProducerEvent
) -> None:
    table = with_step(PRODUCER, state, event, ProducerStep(state, (_PA.FREE,)))
    found = fails(SessionModel(Scope(prefix=True, p_gives_up=True), producer=table))
    assert "D uses chunk" in found.what


def test_without_a_hold_a_prefix_is_used_that_p_needed_for_others() -> None:
    """As soon as its blocks are found they are held."""
    released = ProducerStep(_P.HANDED_OFF, (_PA.ANNOUNCE_PREFIX, _PA.FREE))
    table = with_step(PRODUCER, _P.LOOKING_UP, _PE.FOUND, released)
    assert "D uses chunk" in fails(SessionModel(Scope(prefix=True), producer=table)).what


def test_without_k4_a_prefix_is_used_before_its_release_is_acknowledged() -> None:
    landed = ConsumerStep(_D.FETCHING, (_DA.CONFIRM,))
    table = with_step(CONSUMER, _D.FETCHING, _DE.READ_LANDED, landed)
    found = fails(SessionModel(Scope(prefix=True, p_gives_up=True), consumer=table))
    assert "D uses chunk" in found.what


def test_without_k5_a_read_of_a_prefix_lands_in_another_requests_block() -> None:
    dropped = ReadStep(ReadState.OVER, (ReadAction.FREE_BLOCKS,))
    table = with_step(READ, ReadState.POSTED, ReadEvent.DROPPED, dropped)
    found = fails(SessionModel(Scope(prefix=True, d_gives_up=True), read=table))
    assert "which is another request's" in found.what
