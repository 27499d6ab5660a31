"""What the tests ask of a model: that it holds, or how it fails."""

from collections.abc import Hashable
from typing import TypeVar

from explorer import Counterexample, Model, explore

StateT = TypeVar("StateT", bound=Hashable)


def holds(model: Model[StateT], *, more_than: int) -> None:
    """Assert that nothing goes wrong, in as many states as were meant to be explored."""
    found = explore(model)
    print(f"{found.num_states} states, {found.num_good_ends} good ends")
    assert found.counterexample is None, str(found.counterexample)
    assert found.num_states > more_than


def fails(model: Model[StateT]) -> Counterexample:
    """Return how it fails without one of its rules."""
    found = explore(model)
    print(f"{found.counterexample}\nafter {found.num_states} states")
    assert found.counterexample is not None
    return found.counterexample
