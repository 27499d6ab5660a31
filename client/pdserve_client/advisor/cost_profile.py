"""What steps and handoffs cost on one machine with one model, as measured; saved as JSON."""

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

MAX_FILE_BYTES = 2**20
VERSION = 1
# No step, and nothing else that is measured here, takes longer.
MAX_SECONDS = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Seconds of a step: what it takes at all, for each prompt token, for each pair of a prompt
    token and one that it sees, for each row that decodes, and for each token that such a row sees.

    A step with prompts and decodes takes the larger of the two bases, once.
    """

    prefill_base_s: float
    prompt_token_s: float
    prompt_pair_s: float
    decode_base_s: float
    row_s: float
    context_token_s: float

    def prefill_s(self, num_tokens: int, num_computed: int) -> float:
        """Return what a chunk of a prompt adds to its step's base."""
        num_pairs = num_tokens * (num_computed + num_tokens / 2)
        return self.prompt_token_s * num_tokens + self.prompt_pair_s * num_pairs

    def decode_s(self, num_rows: int, num_context_tokens: int) -> float:
        """Return what rows that decode add to their step's base."""
        return self.row_s * num_rows + self.context_token_s * num_context_tokens

    def base_s(self, *, has_prompts: bool, has_decodes: bool) -> float:
        """Return the base of a step that is not empty."""
        return max(
            self.prefill_base_s if has_prompts else 0.0,
            self.decode_base_s if has_decodes else 0.0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffCost:
    """Seconds of a handoff: until prefill has the answer of an idle decode worker, for each chunk
    of a prompt that is announced, for each token of it, and once for the first decode step to begin
    and its token to be released.
    """

    grant_s: float
    chunk_s: float
    token_s: float
    admit_s: float
    bytes_per_token: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """Sizes of a worker, as it says them."""

    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int

    def __post_init__(self) -> None:
        for each in fields(self):
            if not 1 <= getattr(self, each.name) <= 2**40:
                raise ValueError(f"{each.name} is {getattr(self, each.name)}, must be 1 to 2^40")


@dataclass(frozen=True, slots=True, kw_only=True)
class CostProfile:
    """What the simulation knows of a machine and a model."""

    model: str
    machine: str
    measured_at: str
    step: StepCost
    decode_worker: WorkerLimits
    # What router and network add to every request's first token, both ways.
    overhead_s: float
    # None: measured without prefill workers.
    handoff: HandoffCost | None = None
    prefill_worker: WorkerLimits | None = None
    # Relative errors of the fits: name -> median and largest.
    residuals: dict[str, list[float]] = field(default_factory=dict)

    @property
    def limits(self) -> tuple[WorkerLimits, WorkerLimits]:
        """Of prefill and of decode workers."""
        return self.prefill_worker or self.decode_worker, self.decode_worker


def save_profile(profile: CostProfile, path: Path) -> None:
    """Write it as JSON."""
    path.write_text(json.dumps({"version": VERSION, **asdict(profile)}, indent=2) + "\n")


def load_profile(path: Path) -> CostProfile:
    """Read what `save_profile` has written. Raises ValueError with the field, or OSError."""
    if (size := path.stat().st_size) > MAX_FILE_BYTES:
        raise ValueError(f"{path}: it has {size} bytes, must be at most {MAX_FILE_BYTES}")
    try:
        values = json.loads(path.read_bytes())
    # RecursionError: brackets nested without end.
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON: {str(error)[:120]}") from error
    if not isinstance(values, dict) or values.get("version") != VERSION:
        raise ValueError(f"{path}: version must be {VERSION}; `pdserve advise profile` writes it")
    try:
        return _profile(values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _profile(values: dict[str, Any]) -> CostProfile:
    parts: dict[str, Any] = {
        "step": _part(StepCost, values, "step"),
        "decode_worker": _part(WorkerLimits, values, "decode_worker"),
        "overhead_s": _number("overhead_s", values.get("overhead_s"), float),
    }
    for name in ("model", "machine", "measured_at"):
        value = values.get(name)
        if not isinstance(value, str) or len(value) > 1000:
            raise ValueError(f"{name} must be text of at most 1000 characters")
        parts[name] = value
    for name, part in (("handoff", HandoffCost), ("prefill_worker", WorkerLimits)):
        if values.get(name) is not None:
            parts[name] = _part(part, values, name)
    if ("handoff" in parts) != ("prefill_worker" in parts):
        raise ValueError("handoff and prefill_worker must be there together, or neither")
    if (
        "handoff" in parts
        and parts["prefill_worker"].block_size != parts["decode_worker"].block_size
    ):
        raise ValueError("prefill_worker.block_size must be that of decode_worker")
    return CostProfile(residuals=_residuals(values.get("residuals", {})), **parts)


def _residuals(value: Any) -> dict[str, list[float]]:
    if not isinstance(value, dict) or len(value) > 100:
        raise ValueError("residuals must be an object of at most 100 fields")
    for name, errors in value.items():
        if not isinstance(errors, list) or len(errors) != 2:
            raise ValueError(f"residuals.{name[:60]} must be a list of 2 numbers")
    return {
        name: [_number(f"residuals.{name[:60]}", each, float) for each in errors]
        for name, errors in value.items()
    }


def _part(cls: Any, values: dict[str, Any], name: str) -> Any:
    """Read a dataclass of numbers."""
    given = values.get(name)
    if not isinstance(given, dict):
        raise ValueError(f"{name} must be an object")
    hints = get_type_hints(cls)
    found = {
        each.name: _number(f"{name}.{each.name}", given.get(each.name), hints[each.name])
        for each in fields(cls)
    }
    try:
        return cls(**found)
    except ValueError as error:
        raise ValueError(f"{name}.{error}") from error


def _number(name: str, value: object, kind: type) -> float:
    allowed = (int,) if kind is int else (int, float)
    limit = 2.0**40 if kind is int or name.endswith("bytes_per_token") else MAX_SECONDS
    is_number = type(value) in allowed and isinstance(value, int | float)
    # NaN is not within the limits either.
    if not (is_number and 0 <= value <= limit):  # type: ignore[operator]
        raise ValueError(f"{name} is {value!r:.60}, must be a number from 0 to {limit:g}")
    return value  # type: ignore[return-value]
