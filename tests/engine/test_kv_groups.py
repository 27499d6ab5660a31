import pytest

from pdserve_engine.kv.kv_groups import group_layers, num_skipped_blocks, slots_of


def test_layers_of_one_kind_are_one_group() -> None:
    (group,) = group_layers([None] * 5)
    assert group.layers == (0, 1, 2, 3, 4)
    assert group.window is None
    assert slots_of([group]) == ((0, 0), (0, 1), (0, 2), (0, 3), (0, 4))


def test_groups_have_as_many_slots_as_the_rarest_kind_has_layers() -> None:
    groups = group_layers([8, 8, None, 8, 8, 8, None])
    assert [(group.layers, group.window) for group in groups] == [
        ((2, 6), None),
        ((0, 1), 8),
        ((3, 4), 8),
        ((5,), 8),
    ]
    assert slots_of(groups) == ((1, 0), (1, 1), (0, 0), (2, 0), (2, 1), (3, 0), (0, 1))


@pytest.mark.parametrize("window", [1, 2, 4, 5, 8, 11])
@pytest.mark.parametrize("num_tokens", range(30))
def test_blocks_are_skipped_when_no_later_token_sees_any_of_their_positions(
    window: int, num_tokens: int
) -> None:
    visible = range(max(num_tokens - window + 1, 0), num_tokens + 1)
    assert num_skipped_blocks(window, num_tokens, 4) == visible[0] // 4
    assert num_skipped_blocks(None, num_tokens, 4) == 0
