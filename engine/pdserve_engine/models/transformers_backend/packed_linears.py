"""The linears of transformers' modules on a kernel set, and what adapters add to them."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from pdserve_engine.lora.adapter import LoraAdapter
from pdserve_engine.lora.adapter_config import Targets
from pdserve_kernels import KernelSet
from pdserve_kernels.lora import LoraPart, LoraRows, LoraSegment

_INDEX = re.compile(r"(?<=\.)\d+(?=\.)")


class PackedLinears:
    """A model's plain linears, packed. One forward pass at a time runs through them."""

    def __init__(self, root: nn.Module, kernels: KernelSet) -> None:
        """Replace them one by one: each frees its weight before the next is packed."""
        self._kernels = kernels
        self._step = _Step()
        self._linears: dict[str, _PackedLinear] = {}
        # What adapters may change; none are known before `watched`.
        self.lora_targets: Targets = {}
        # A weight that is also the embedding's would be held twice.
        tables = {
            id(module.weight) for module in root.modules() if isinstance(module, nn.Embedding)
        }
        for place in _plain_linears(root):
            linear: nn.Linear | Conv1D = getattr(place.parent, place.child)
            if id(linear.weight) not in tables:
                packed = _PackedLinear(place.name, linear, kernels, self._step)
                self._linears[place.name] = packed
                setattr(place.parent, place.child, packed)

    @contextmanager
    def watched(self, num_tokens: int) -> Iterator[None]:
        """Watch a forward pass of so many tokens, which shows what adapters may change: linears of
        the layers whose rows are the step's tokens. Those of experts get some of the tokens.
        """
        seen: defaultdict[str, list[int]] = defaultdict(list)

        def count_rows(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            assert isinstance(module, _PackedLinear)
            seen[module.name].append(inputs[0].numel() // inputs[0].shape[-1])

        with ExitStack() as hooks:
            for linear in self._linears.values():
                hooks.enter_context(linear.register_forward_pre_hook(count_rows))
            yield
        self.lora_targets = {
            name: linear.shape
            for name, linear in self._linears.items()
            if set(seen[name]) == {num_tokens} and len(_INDEX.findall(name)) == 1
        }

    @contextmanager
    def adapted(self, lora: Sequence[LoraSegment]) -> Iterator[None]:
        """Run one forward pass, whose tokens have these adapters, as `pack_adapter` made them."""
        self._step.lora = lora
        try:
            yield
        finally:
            self._step.lora = ()

    def pack_adapter(self, adapter: LoraAdapter) -> Mapping[str, Any]:
        """Return what `pack_lora` makes of the adapter's part in each linear, by its name."""
        return {
            name: self._kernels.pack_lora(
                [LoraPart(0, module.a, module.b, module.scale)], self._linears[name].packed
            )
            for name, module in adapter.modules.items()
        }


class _Place(NamedTuple):
    """Where a module is: an attribute of its parent, and its name from the root on."""

    parent: nn.Module
    child: str
    name: str


class _Step:
    """What the linears have to know of the forward pass that runs."""

    def __init__(self) -> None:
        self.lora: Sequence[LoraSegment] = ()

    def rows_of(self, name: str) -> list[LoraRows]:
        """Return the rows that have an adapter in a linear."""
        return [
            LoraRows(begin, end, adapter[name])
            for begin, end, adapter in self.lora
            if name in adapter
        ]


class _PackedLinear(nn.Module):
    """A linear whose weight is packed for the kernel set."""

    def __init__(
        self, name: str, linear: nn.Linear | Conv1D, kernels: KernelSet, step: _Step
    ) -> None:
        super().__init__()
        self.name = name
        # GPT-2's linears have [in_features, out_features].
        weight = linear.weight.t().contiguous() if isinstance(linear, Conv1D) else linear.weight
        self.shape = (weight.shape[0], weight.shape[1])
        self.packed = kernels.pack_linear(weight, linear.bias)
        # Says shape and dtype, which routers of experts ask for. What computes with it fails.
        self.weight = torch.empty_like(linear.weight, device="meta")
        self._kernels = kernels
        self._step = step

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self._step.rows_of(self.name)
        if not rows:
            result: torch.Tensor = self._kernels.linear(x, self.packed)
            return result
        adapted = self._kernels.linear_lora(x.reshape(-1, x.shape[-1]), self.packed, rows)
        return adapted.reshape(*x.shape[:-1], adapted.shape[-1])


def _plain_linears(root: nn.Module) -> list[_Place]:
    """Subclasses do more than a matrix product."""
    return [
        _Place(parent, child, f"{prefix}.{child}".lstrip("."))
        for prefix, parent in root.named_modules()
        for child, module in parent.named_children()
        if type(module) in (nn.Linear, Conv1D)
    ]
