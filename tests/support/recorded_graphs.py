"""CUDA graphs without a GPU: what a capture runs is recorded, call by call, and run again.

As on a GPU a replay reads and writes the tensors of the capture, and whatever else its calls were
given is as it was then.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

# They wait for the device, which a capture refuses.
_WAITING = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default}


class RecordedGraph:
    """In the place of torch.cuda.CUDAGraph."""

    def __init__(self) -> None:
        self._calls: list[Callable[[], None]] = []
        # Launches of Triton's kernels among them.
        self.num_kernels = 0
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1
        for call in self._calls:
            call()

    def add_function(self, function: Any, args: Any, kwargs: Any, results: Any) -> None:
        def call() -> None:
            again = function(*args, **kwargs)
            for old, new in zip(tree_leaves(results), tree_leaves(again), strict=True):
                # Else it is a view of the same memory, or was changed in place.
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

        self._calls.append(call)

    def add_kernel(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        self.num_kernels += 1


def have_few_graphs(patch: pytest.MonkeyPatch, *batch_sizes: int) -> None:
    """Of decodes only these sizes, and one of chunks."""
    from pdserve_engine.runner.run import cuda_stepper
    from pdserve_engine.runner.run import graph_buffers as cuda_graphs

    def few(max_num_seqs: int) -> list[tuple[int, int]]:
        sizes = cuda_graphs.graph_sizes(max_num_seqs)
        return [each for each in sizes if each[0] != each[1] or each[0] in batch_sizes]

    patch.setattr(cuda_graphs, "CHUNK_TOKENS", (16,))
    patch.setattr(cuda_stepper, "graph_sizes", few)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, graph: RecordedGraph) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = graph

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        assert function not in _WAITING, f"{function} waits for the device in a capture"
        results = function(*args, **(kwargs or {}))
        self.graph.add_function(function, args, kwargs or {}, results)
        return results


class Launches:
    """How many of Triton's kernels were launched outside of graphs."""

    count = 0


@contextmanager
def recorded_graphs() -> Iterator[Launches]:
    """Within, CUDA's graphs are recorded on the CPU, kernels by Triton's interpreter."""
    from triton.runtime import interpreter

    launches = Launches()
    recorders: list[_Recorder] = []
    launch = interpreter.GridExecutor.__call__

    def launch_or_record(executor: Any, *args: Any, **kwargs: Any) -> None:
        with _disable_current_modes():
            launch(executor, *args, **kwargs)
        if recorders:
            recorders[-1].graph.add_kernel(lambda: launch(executor, *args, **kwargs))
        else:
            launches.count += 1

    @contextmanager
    def capture(graph: RecordedGraph, **options: object) -> Iterator[None]:
        with _Recorder(graph) as recorder:
            recorders.append(recorder)
            try:
                yield
            finally:
                recorders.pop()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__call__", launch_or_record)
        patch.setattr(torch.cuda, "CUDAGraph", RecordedGraph)
        patch.setattr(torch.cuda, "graph", capture)
        patch.setattr(torch.cuda, "graph_pool_handle", object)
        patch.setattr(torch.cuda, "Stream", _Stream)
        patch.setattr(torch.cuda, "current_stream", _Stream)
        patch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        yield launches


class _Stream:
    """Of a device that does everything at once."""

    def __init__(self, device: object) -> None: ...

    def wait_stream(self, stream: "_Stream") -> None: ...
