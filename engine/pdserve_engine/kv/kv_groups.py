"""KV groups: layers whose attention sees the same positions share block tables.

Source of the design: vLLM V1's hybrid KV cache groups. All groups have the same number of layer
slots (the last of a kind may leave some unused), so that the blocks of all groups have one size and
come from one pool.
"""

from collections.abc import Sequence
from typing import NamedTuple


class KVGroupLayers(NamedTuple):
    """The layers of one group, at most `num_slots` of them; the i-th lies in slot i of a block."""

    layers: tuple[int, ...]
    # A token sees the last `window` positions, its own included; None: all.
    window: int | None


def group_layers(windows: Sequence[int | None]) -> tuple[KVGroupLayers, ...]:
    """Group layers, given each layer's window; the full groups come first, then by window.

    A block has as many slots as the rarest kind has layers: Gemma 3's 22 sliding and 4 full layers
    become 1 full and 6 sliding groups of 4 slots.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)
    num_slots = min(len(layers) for layers in kinds.values())
    full_first = sorted(kinds, key=lambda window: (window is not None, window or 0))
    return tuple(
        KVGroupLayers(tuple(kinds[window][start : start + num_slots]), window)
        for window in full_first
        for start in range(0, len(kinds[window]), num_slots)
    )


def slots_of(groups: Sequence[KVGroupLayers]) -> tuple[tuple[int, int], ...]:
    """Return for each layer its (group, slot): where in a block, and of whose block table."""
    places = {
        layer: (group_id, slot)
        for group_id, group in enumerate(groups)
        for slot, layer in enumerate(group.layers)
    }
    return tuple(places[layer] for layer in range(len(places)))


def num_skipped_blocks(window: int | None, num_tokens: int, block_size: int) -> int:
    """Return how many blocks at the start of a request's table hold only tokens that neither the
    token at position `num_tokens` nor any later one sees.
    """
    if window is None:
        return 0
    return max(num_tokens - window + 1, 0) // block_size
