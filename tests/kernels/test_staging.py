"""Arrays that travel in one buffer."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from pdserve_kernels.triton.staging import ALIGNMENT, Field, Layout

CPU = torch.device("cpu")
DTYPES = (np.int32, np.int64, np.float32, np.float64)
FIELDS = st.lists(
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), min_size=1, max_size=3)),
    min_size=1,
    max_size=6,
)


@given(FIELDS, st.randoms(use_true_random=False))
def test_all_arrays_arrive_whole_and_aligned(fields, rng) -> None:
    layout = Layout({str(i): Field(dtype, tuple(shape)) for i, (dtype, shape) in enumerate(fields)})
    arrays = {
        str(i): np.array(
            [rng.randrange(100) for _ in range(int(np.prod(shape)))], dtype=dtype
        ).reshape(shape)
        for i, (dtype, shape) in enumerate(fields)
    }
    views = layout.to_device(arrays, CPU)
    for name, array in arrays.items():
        assert layout.start_of(name) % ALIGNMENT == 0
        assert views[name].numpy().dtype == array.dtype
        np.testing.assert_array_equal(views[name].numpy(), array)


def test_a_smaller_array_leaves_the_rest_as_it_was() -> None:
    layout = Layout({"a": Field(np.int64, (2, 3)), "b": Field(np.int32, (4,))})
    buffer = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    layout.fill(buffer, {"a": np.full((2, 3), 7), "b": np.full(4, 8)})
    layout.fill(buffer, {"a": np.full((2, 1), 1), "b": np.full(2, 2)})
    views = layout.views(buffer)
    assert views["a"].tolist() == [[1, 7, 7], [1, 7, 7]]
    assert views["b"].tolist() == [2, 2, 8, 8]
