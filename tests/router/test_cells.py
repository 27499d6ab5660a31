"""How a long list of workers is cut into cells."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve_common.types.engine import WorkerRole
from pdserve_router.workers.cells import Cell

P, D = WorkerRole.PREFILL, WorkerRole.DECODE
SIZE = 8


def lists_of(num_prefill: int, num_decode: int) -> dict[WorkerRole, tuple[str, ...]]:
    return {
        P: tuple(f"p{i}:1" for i in range(num_prefill)),
        D: tuple(f"d{i}:1" for i in range(num_decode)),
    }


def all_cells(lists: dict[WorkerRole, tuple[str, ...]]) -> list[dict[WorkerRole, tuple[str, ...]]]:
    """Return the cells of routers 0, 1, ..., one of each."""
    cells = [Cell(f"router-{i}", SIZE).members(lists) for i in range(100)]
    number = next((i for i in range(1, 100) if cells[i] == cells[0]), 1)
    assert cells[:number] == cells[number : 2 * number]
    return cells[:number]


@given(st.integers(0, 60), st.integers(1, 60))
def test_each_worker_is_in_one_cell_and_cells_are_alike(num_prefill: int, num_decode: int) -> None:
    lists = lists_of(num_prefill, num_decode)
    cells = all_cells(lists)
    for role, addresses in lists.items():
        assert sorted(a for cell in cells for a in cell[role]) == sorted(addresses)
        sizes = {len(cell[role]) for cell in cells}
        assert max(sizes) - min(sizes) <= 1
        assert 0 not in sizes or not addresses
        assert all(list(cell[role]) == [a for a in addresses if a in cell[role]] for cell in cells)
    if min(num_prefill, num_decode) * SIZE >= num_prefill + num_decode:
        assert all(len(cell[P]) + len(cell[D]) <= SIZE + 1 for cell in cells)


@given(st.integers(2, 60), st.integers(2, 60), st.data())
def test_a_worker_that_goes_changes_little(num_prefill: int, num_decode: int, data) -> None:
    lists = lists_of(num_prefill, num_decode)
    gone = data.draw(st.sampled_from(lists[D]))
    before = all_cells(lists)
    after = all_cells(lists | {D: tuple(a for a in lists[D] if a != gone)})
    if len(after) != len(before):
        return
    for old, new in zip(before, after, strict=True):
        assert old[P] == new[P]
        assert len(set(old[D]) ^ set(new[D])) <= 3


@pytest.mark.parametrize("size", [0, 200])
def test_a_list_that_fits_is_one_cell(size: int) -> None:
    lists = lists_of(40, 60)
    assert Cell("a", size).members(lists) == lists


def test_the_same_name_has_the_same_cell_and_others_are_spread() -> None:
    lists = lists_of(100, 100)
    cells = [Cell(f"router-{i:x}a", 20).members(lists) for i in range(400)]
    assert cells[0] == Cell("router-0a", 20).members(lists)
    owners = [sum(cell == each for cell in cells) for each in all_cells_of(cells)]
    assert len(owners) == 10
    assert min(owners) > 15


def all_cells_of(cells: list) -> list:
    return [cell for i, cell in enumerate(cells) if cell not in cells[:i]]
