"""Ways to cut a model."""

import itertools

from pdserve_common.kv_types import KVShard


def cut(num_heads: int, num_slots: int, tp_size: int, pp_size: int = 1) -> list[KVShard]:
    """Return what the ranks of a model hold of a block; stages may differ by a slot. With more
    ranks than heads neighbours have the same one.
    """
    slots = [stage * num_slots // pp_size for stage in range(pp_size + 1)]
    count = max(1, num_heads // tp_size)
    return [
        KVShard(
            first_kv_head=rank * num_heads // tp_size,
            num_kv_heads=count,
            first_slot=first,
            num_slots=end - first,
        )
        for first, end in itertools.pairwise(slots)
        for rank in range(tp_size)
    ]
