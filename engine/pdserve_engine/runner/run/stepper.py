"""How a device runs a model's steps: a protocol, and the way that has one after another."""

from typing import Any, Protocol

import torch

from pdserve_engine.models.base import Model
from pdserve_engine.request.sched_output import AsyncModelRunnerOutput
from pdserve_engine.runner.run.step_arrays import StepArrays
from pdserve_engine.runner.run.step_inputs import StepInputs


class Stepper(Protocol):
    """Runs forward passes, and may launch whole steps ahead of their results. The model is handed
    in with each call: a sleep gives it back.
    """

    def begin(self) -> None:
        """A step is about to be planned."""

    def launch(self, model: Model, step: StepArrays) -> AsyncModelRunnerOutput | None:
        """Launch a step without drafts and what samples its tokens; None if it has to be sampled
        by the host, behind `forward`.
        """

    def forward(self, model: Model, step: StepArrays) -> torch.Tensor:
        """Return the hidden states [num_tokens, hidden_size] of a step, in the model's dtype,
        behind all steps that were launched before.
        """

    def reserve_adapters(self, model: Model, count: int, max_rank: int) -> None:
        """Steps may have so many adapters, of ranks up to max_rank. Comes before
        `capture_graphs`.
        """

    def add_adapter(self, digest: str, adapter: Any) -> None:
        """Have an adapter, as the model's `pack_adapter` made it, for the steps that follow."""

    def remove_adapter(self, digest: str) -> None:
        """Forget an adapter, if it is there; no step that follows has it."""

    def warm_up(self, model: Model) -> None:
        """Launch each kernel that `capture_graphs` does not, and requests may need: some devices
        compile it at its first launch.
        """

    def capture_graphs(self, model: Model) -> None:
        """Record what the device can replay."""

    def release_graphs(self) -> None:
        """Forget what was recorded: memory that it reads is about to go. All steps are over."""


class EagerStepper:
    """Runs a step when it is asked for. Nothing is launched ahead, warmed up or recorded."""

    def __init__(self, inputs: StepInputs) -> None:
        self._inputs = inputs

    def begin(self) -> None: ...

    def launch(self, model: Model, step: StepArrays) -> None: ...

    def forward(self, model: Model, step: StepArrays) -> torch.Tensor:
        """See Stepper."""
        return model.forward(self._inputs.build(step))

    def reserve_adapters(self, model: Model, count: int, max_rank: int) -> None: ...

    def add_adapter(self, digest: str, adapter: Any) -> None:
        """See Stepper."""
        self._inputs.adapters[digest] = adapter

    def remove_adapter(self, digest: str) -> None:
        """See Stepper."""
        self._inputs.adapters.pop(digest, None)

    def warm_up(self, model: Model) -> None: ...

    def capture_graphs(self, model: Model) -> None: ...

    def release_graphs(self) -> None: ...
