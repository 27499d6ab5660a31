"""What every section of `bench_gpu.py` gets: the device, sizes, a clock, and where results go."""

import argparse
import functools
import gc
import json
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from gpu.measure import Clock, Limits, measure_limits
from gpu.shapes import FULL, LARGE, SMALL, TINY, shrink

MAX_TRACEBACK_LINES = 12


class Bench:
    """A section's run; `part` is the file that its records go to."""

    def __init__(self, args: argparse.Namespace, part: Path) -> None:
        self.device = torch.device(args.device)
        self.is_cuda = self.device.type == "cuda"
        self.sizes = TINY if args.tiny else FULL
        self.large, self.small = (shrink(LARGE), shrink(SMALL)) if args.tiny else (LARGE, SMALL)
        # Of the engines' EngineConfig.
        self.options: dict[str, Any] = dict(args.option)
        self.clock = Clock(self.device, self.sizes.seconds)
        self._records: list[dict[str, Any]] = []
        self._part = part

    @functools.cached_property
    def limits(self) -> Limits:
        return measure_limits(self.clock, self.sizes, self.device)

    def record(self, name: str, **values: Any) -> None:
        """Print a line, and keep it whatever happens next."""
        self._records.append({"name": name} | values)
        self._part.write_text(json.dumps(self._records))
        print(f"  {name:<44} {', '.join(_formatted(values))}", flush=True)

    def attempt(self, case: Callable[..., object], *args: Any) -> None:
        """Run `case(self, *args)`, then free its memory; one that fails leaves the others alone."""
        try:
            case(self, *args)
        except Exception as error:  # whatever a kernel may raise
            self.record("failed", case=f"{case.__name__} {args}"[-120:], error=last_lines(error))
        gc.collect()
        if self.is_cuda:
            torch.cuda.empty_cache()

    def normal(self, *size: int, std: float = 1.0) -> torch.Tensor:
        """Return random bf16 on the device, drawn in place: pools fill most of the memory."""
        return torch.empty(size, dtype=torch.bfloat16, device=self.device).normal_(std=std)


def last_lines(error: BaseException) -> list[str]:
    """Return the end of a traceback."""
    lines = "".join(traceback.format_exception(error)).splitlines()
    return [line[:200] for line in lines[-MAX_TRACEBACK_LINES:]]


def _formatted(values: dict[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        if name.startswith("share") or name.endswith("_share"):
            yield f"{name} {value:.1%}"
        elif isinstance(value, float):
            yield f"{name} {value:.4g}"
        elif isinstance(value, list | dict):
            yield f"{name}:" + "".join(f"\n      {item}" for item in _items(value))
        else:
            yield f"{name} {value}"


def _items(value: Any) -> list[str]:
    return [f"{k}: {v}" for k, v in value.items()] if isinstance(value, dict) else list(value)
