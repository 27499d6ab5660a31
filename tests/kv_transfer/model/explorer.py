"""Explores all reachable states of a small model of the protocol; shows how a bad one is reached.

Three models use it: `session_model` (one KV session, rules K1 to K5; its two ends are the tables of
kv_transfer/protocol/transitions.py that the connectors carry out), `recovery_model` (the router and
two Ds, K6 and K7) and `grant_model` (two Ps and two Ds that must not wait for each other for ever).

**What is claimed.** A state is all that the processes and the network remember; a step is whatever
one of them may do next. There is no clock: a timeout may strike at any moment, and a message, a
READ or a stopped process may take as long as it likes, so what holds here holds under any delay.
`explore` visits every state, nearest first, and reports a *bad* one (a wrong byte, a wrong token),
or one from which no *good end* can be reached any more (a leak, a deadlock).

**How to read a counterexample.** It is a shortest one. Each line is a step, and beside it the state
that it led to. The last line is where the rule was needed: the tests take one rule away at a time
and expect such a trace. `pytest -s` prints them, and how many states there are.

**What is abstracted.** Two chunks stand for many blocks, two workers for many. A link keeps order
and loses nothing until it breaks. What goes wrong goes wrong once or twice where more of it brings
nothing new. The models say what else they leave out.
"""

import contextlib
import gc
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

StateT = TypeVar("StateT", bound=Hashable)


class Model(Protocol[StateT]):
    """What can be explored."""

    def initial(self) -> StateT:
        """Where it starts."""

    def steps(self, state: StateT) -> Iterator[tuple[str, StateT]]:
        """Yield all that may happen next, and what it leads to."""

    def bad(self, state: StateT) -> str:
        """Say what must never be the case, or nothing."""

    def is_good_end(self, state: StateT) -> bool:
        """Whether all is given back and nobody waits: one such state must stay within reach."""

    def show(self, state: StateT) -> str:
        """Describe a state in less than a line."""


@dataclass(frozen=True, slots=True)
class Counterexample:
    """How a model fails: the label of each step, and the state after it."""

    what: str
    steps: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        width = max((len(label) for label, _ in self.steps), default=0)
        lines = [
            f"{number:3}. {label:{width}}  | {shown}"
            for number, (label, shown) in enumerate(self.steps, 1)
        ]
        return "\n".join([self.what, *lines])

    def happens(self, *labels: str) -> bool:
        """Whether steps that start so are among its steps, in this order."""
        steps = iter(label for label, _ in self.steps)
        return all(any(step.startswith(label) for step in steps) for label in labels)


@dataclass(frozen=True, slots=True)
class Exploration:
    """What was found. Without a counterexample `num_states` are all there are."""

    num_states: int
    num_good_ends: int
    counterexample: Counterexample | None


class _Graph(Generic[StateT]):
    """The states found so far, in the order of their distance, and the steps between them."""

    def __init__(self, first: StateT) -> None:
        self.states = [first]
        self.predecessors: list[list[int]] = [[]]
        self._numbers = {first: 0}
        self._labels = [""]

    def add(self, origin: int, label: str, state: StateT) -> None:
        number = self._numbers.setdefault(state, len(self.states))
        if number == len(self.states):
            self.states.append(state)
            self.predecessors.append([])
            self._labels.append(label)
        self.predecessors[number].append(origin)

    def path(self, number: int) -> list[tuple[str, StateT]]:
        """Return a shortest way to a state: who came to it first was nearest to the start."""
        steps = []
        while number:
            steps.append((self._labels[number], self.states[number]))
            number = self.predecessors[number][0]
        return steps[::-1]

    def can_reach(self, goals: list[int]) -> bytearray:
        """Return a 1 for each state from which one of `goals` can be reached."""
        reaching = bytearray(len(self.states))
        frontier = list(goals)
        while frontier:
            number = frontier.pop()
            if not reaching[number]:
                reaching[number] = 1
                frontier.extend(self.predecessors[number])
        return reaching


def explore(model: Model[StateT]) -> Exploration:
    """Visit all states of a model, up to the first bad one."""
    with _garbage_left_alone():
        return _explore(model)


@contextlib.contextmanager
def _garbage_left_alone() -> Iterator[None]:
    """A million values that are kept, and no cycle among them, are much to look through."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _explore(model: Model[StateT]) -> Exploration:
    graph = _Graph(model.initial())
    # The list grows under the loop: that is the search.
    for number, state in enumerate(graph.states):
        what = model.bad(state)
        if what:
            return _failed(model, graph, number, what, 0)
        for label, after in model.steps(state):
            graph.add(number, label, after)
    good_ends = [i for i, state in enumerate(graph.states) if model.is_good_end(state)]
    stuck = graph.can_reach(good_ends).find(0)
    if stuck >= 0:
        what = "from here no good end can be reached"
        return _failed(model, graph, stuck, what, len(good_ends))
    return Exploration(len(graph.states), len(good_ends), None)


def _failed(
    model: Model[StateT], graph: _Graph[StateT], number: int, what: str, num_good_ends: int
) -> Exploration:
    steps = tuple((label, model.show(state)) for label, state in graph.path(number))
    return Exploration(len(graph.states), num_good_ends, Counterexample(what, steps))
