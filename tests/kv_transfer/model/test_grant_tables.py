"""The grant model goes no way that the production tables do not have: each of its moves, until D
has all blocks, is one of both ends' sessions.
"""

import pytest
from grant_model import REVOCABLE, GrantModel, Request, Stage

from pdserve_engine.kv_transfer.protocol.transitions import (
    CONSUMER,
    PRODUCER,
    ConsumerEvent,
    ConsumerState,
    ProducerEvent,
    ProducerState,
)

_P, _PE = ProducerState, ProducerEvent
_D, _DE = ConsumerState, ConsumerEvent

# What the two ends of a request's session are in meanwhile.
STATES = {
    Stage.QUEUED: (_P.ASKING, _D.TICKET),
    Stage.CLAIMED: (_P.ASKING, _D.AWAITING_GRANT),
    Stage.GRANTED: (_P.GRANTED, _D.GRANTED),
    Stage.STARTED: (_P.SENDING, _D.GRANTED),
    Stage.PULLED: (_P.SENDING, _D.PULLING),
    Stage.READY: (_P.ENDED, _D.ACCEPTED),
}
# What happens to them at each move; nothing where a request comes again as another attempt.
MOVES: dict[tuple[Stage, Stage], tuple[tuple[_PE, ...], tuple[_DE, ...]]] = {
    (Stage.QUEUED, Stage.CLAIMED): ((), (_DE.ASKED,)),
    (Stage.CLAIMED, Stage.GRANTED): ((_PE.GRANTED,), (_DE.RESERVED,)),
    (Stage.GRANTED, Stage.CLAIMED): ((_PE.REVOKED,), (_DE.RECLAIMED,)),
    (Stage.GRANTED, Stage.STARTED): ((_PE.STARTED,), ()),
    (Stage.STARTED, Stage.PULLED): ((_PE.COMPUTED,), (_DE.ANNOUNCED,)),
    (Stage.PULLED, Stage.READY): (
        (_PE.PREFILLED, _PE.RELEASED_ALL),
        (_DE.PREFILL_DONE, _DE.READ_LANDED, _DE.CONFIRMED, _DE.ALL_LANDED, _DE.COMPLETED),
    ),
}
NEW_ATTEMPT = (Stage.STARTED, Stage.QUEUED)
# D reclaims what P has just started.
SCARCE = GrantModel(
    requests=(Request(0, 0, 1), Request(0, 0, 1), Request(0, 0, 1)), p_blocks=(2,), d_blocks=(6,)
)


def find_moves(model: GrantModel) -> set[tuple[Stage, Stage]]:
    """Return all changes of a request's stage that can happen."""
    seen = {model.initial()}
    todo = [model.initial()]
    moves: set[tuple[Stage, Stage]] = set()
    while todo:
        world = todo.pop()
        for _, after in model.steps(world):
            pairs = zip(world.items, after.items, strict=True)
            moves |= {(a.stage, b.stage) for a, b in pairs if a.stage is not b.stage}
            if after not in seen:
                seen.add(after)
                todo.append(after)
    return moves


def test_the_model_moves_as_sessions_do() -> None:
    moves = {move for move in find_moves(SCARCE) if move[0] in STATES and move[1] in STATES}
    assert moves == {*MOVES, NEW_ATTEMPT}


@pytest.mark.parametrize(("before", "after"), MOVES)
def test_a_move_is_one_of_the_tables(before: Stage, after: Stage) -> None:
    p, d = STATES[before]
    p_events, d_events = MOVES[before, after]
    for p_event in p_events:
        p = PRODUCER[p][p_event].next
    for d_event in d_events:
        d = CONSUMER[d][d_event].next
    assert (p, d) == STATES[after]


def test_what_p_has_started_when_d_reclaims_it_is_given_up() -> None:
    p, d = STATES[Stage.STARTED]
    assert PRODUCER[p][_PE.REVOKED].next is _P.ENDED
    assert CONSUMER[d][_DE.RECLAIMED].next is _D.AWAITING_GRANT


def test_the_tables_have_no_other_way_to_blocks() -> None:
    """D's blocks before P's, and what is announced stays."""
    assert [p for p in _P if _PE.STARTED in PRODUCER[p]] == [_P.GRANTED]
    assert [d for d in _D if _DE.RESERVED in CONSUMER[d]] == [_D.AWAITING_GRANT]
    revocable = {stage for stage, (_, d) in STATES.items() if _DE.RECLAIMED in CONSUMER[d]}
    assert revocable == REVOCABLE
