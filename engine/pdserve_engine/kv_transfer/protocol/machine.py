"""Walks the tables of transitions of protocol/transitions.py."""

from collections.abc import Iterable, Mapping
from typing import Protocol, TypeVar

StateT = TypeVar("StateT")
EventT = TypeVar("EventT")
ActionT = TypeVar("ActionT")
StateT_co = TypeVar("StateT_co", covariant=True)
ActionT_co = TypeVar("ActionT_co", covariant=True)


class Step(Protocol[StateT_co, ActionT_co]):
    """An entry of a table."""

    @property
    def next(self) -> StateT_co: ...

    @property
    def actions(self) -> tuple[ActionT_co, ...]: ...


class HasState(Protocol[StateT]):
    """What a table is about: a session, a pull, a READ."""

    state: StateT


def take_step(
    table: Mapping[StateT, Mapping[EventT, Step[StateT, ActionT]]],
    item: HasState[StateT],
    event: EventT,
) -> tuple[ActionT, ...] | None:
    """Enter the state that the table says, and return the actions to carry out then, in order.
    None, and nothing, if it has no such step: the event comes too late, or makes no sense (K8).
    """
    step = table[item.state].get(event)
    if step is None:
        return None
    item.state = step.next
    return step.actions


def check_carried_out(actions: Mapping[ActionT, object], wanted: Iterable[ActionT]) -> None:
    """Raise AssertionError if `actions` lacks one of those that a table's steps are made of, or has
    others: a step would fail half taken.
    """
    assert set(actions) == set(wanted), set(actions) ^ set(wanted)
