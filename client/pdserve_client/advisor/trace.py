"""Requests over time: read from JSONL files of others and of our own, or drawn by a seed."""

import functools
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

MAX_FILE_BYTES = 512 * 2**20
MAX_LINE_BYTES = 2**20
# A trace has at most so many different shared starts: 16 tokens each of ours, one hash id of
# Mooncake's.
MAX_PREFIX_UNITS = 1 << 25
MAX_REQUESTS = 1_000_000
MAX_TOKENS = 2**22
MAX_ARRIVAL_S = 1e8
MAX_NAME_CHARS = 256
# What one entry of `TraceRequest.prefix` stands for, unless the trace says otherwise.
PREFIX_UNIT_TOKENS = 16
# A hash_id of a trace stands for so many tokens, as Mooncake publishes them.
HASH_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. Requests whose prefixes begin alike share that part of their prompt."""

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    # One entry for each whole unit of the prompt that others may have too, from its start.
    prefix: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrival; the first arrives at 0."""

    requests: tuple[TraceRequest, ...]
    unit_tokens: int = PREFIX_UNIT_TOKENS

    @property
    def rate(self) -> float:
        """Mean requests a second; infinite if all arrive at once."""
        last = self.requests[-1].arrival_s
        return (len(self.requests) - 1) / last if last > 0 else math.inf

    def at_rate(self, rate: float) -> "Trace":
        """Return the same requests with all pauses stretched alike, so that the mean is `rate`."""
        factor = self.rate / rate
        requests = (replace(each, arrival_s=each.arrival_s * factor) for each in self.requests)
        return replace(self, requests=tuple(requests))


class TraceError(ValueError):
    """A line of a trace that cannot be used."""


def read_trace(path: Path, *, hash_block_tokens: int = HASH_BLOCK_TOKENS) -> Trace:
    """Read a trace, one JSON object a line. Its first line says the format:

    - ours, which `pdserve bench --save-requests` writes: arrival_s, num_prompt_tokens,
      num_output_tokens; a shared start as prefix_id and num_prefix_tokens;
    - Mooncake's: timestamp (ms), input_length, output_length; a shared start as hash_ids, one for
      each `hash_block_tokens` tokens.

    Other fields are ignored. Raises TraceError with line and field, or OSError.
    """
    if not 1 <= hash_block_tokens <= MAX_TOKENS:
        raise ValueError(f"hash_block_tokens is {hash_block_tokens}, must be 1 to {MAX_TOKENS}")
    if (size := path.stat().st_size) > MAX_FILE_BYTES:
        raise TraceError(f"{path}: it has {size} bytes, must be at most {MAX_FILE_BYTES}")
    requests: list[TraceRequest] = []
    parse: Callable[[_Line], TraceRequest] | None = None
    unit_tokens = PREFIX_UNIT_TOKENS
    # By object: one that requests share whole is here once.
    num_units: dict[int, int] = {}
    num_all_units = 0
    for line in _lines(path):
        if parse is None:
            is_mooncake = "timestamp" in line.fields
            parse = _parse_mooncake if is_mooncake else _parse_own
            unit_tokens = hash_block_tokens if is_mooncake else PREFIX_UNIT_TOKENS
        if len(requests) == MAX_REQUESTS:
            raise line.error(f"the trace has more than {MAX_REQUESTS} requests")
        requests.append(parse(line))
        prefix = requests[-1].prefix
        if id(prefix) not in num_units:
            num_units[id(prefix)] = len(prefix)
            num_all_units += len(prefix)
        if num_all_units > MAX_PREFIX_UNITS:
            raise line.error(f"shared starts have more than {MAX_PREFIX_UNITS} entries together")
    if len(requests) < 2:
        raise TraceError(f"{path}: it has {len(requests)} requests, must have at least 2")
    return _in_order(requests, unit_tokens)


def _in_order(requests: list[TraceRequest], unit_tokens: int) -> Trace:
    requests.sort(key=lambda each: each.arrival_s)
    first = requests[0].arrival_s
    moved = (replace(each, arrival_s=each.arrival_s - first) for each in requests)
    return Trace(tuple(moved), unit_tokens)


@dataclass(frozen=True, slots=True)
class _Line:
    path: Path
    number: int
    fields: Mapping[str, Any]

    def error(self, message: str) -> TraceError:
        return TraceError(f"{self.path}:{self.number}: {message}")

    def tokens(self, name: str, low: int = 1, high: int = MAX_TOKENS) -> int:
        value = self.fields.get(name)
        if type(value) is not int or not low <= value <= high:
            raise self.error(f"{name} is {_shown(value)}, must be an integer from {low} to {high}")
        return value

    def seconds(self, name: str, unit_s: float = 1.0) -> float:
        value = self.fields.get(name)
        limit = MAX_ARRIVAL_S / unit_s
        # NaN is not within the limits either.
        if isinstance(value, bool) or not (isinstance(value, int | float) and 0 <= value <= limit):
            raise self.error(f"{name} is {_shown(value)}, must be a number from 0 to {limit:g}")
        return float(value) * unit_s


def _shown(value: object) -> str:
    """A value in a message, however long it is."""
    return "missing" if value is None else repr(value)[:60]


def _lines(path: Path) -> Iterator[_Line]:
    """Yield the objects of the lines that are not empty."""
    with path.open("rb") as file:
        number = 0
        while text := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            line = _Line(path, number, {})
            if len(text) > MAX_LINE_BYTES:
                raise line.error(f"the line is longer than {MAX_LINE_BYTES} bytes")
            if not text.strip():
                continue
            try:
                fields = json.loads(text, parse_constant=_refuse_constant)
            # RecursionError: brackets nested without end.
            except (ValueError, RecursionError) as error:
                raise line.error(f"not JSON: {str(error)[:120]}") from error
            if not isinstance(fields, dict):
                raise line.error(f"it is {_shown(fields)}, must be a JSON object")
            yield replace(line, fields=fields)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _parse_own(line: _Line) -> TraceRequest:
    num_prompt_tokens = line.tokens("num_prompt_tokens")
    prefix: tuple[int, ...] = ()
    if (name := line.fields.get("prefix_id")) is not None:
        if type(name) not in (int, str) or len(str(name)) > MAX_NAME_CHARS:
            raise line.error(
                f"prefix_id is {_shown(name)}, must be an integer or text of at most "
                f"{MAX_NAME_CHARS} characters"
            )
        num_prefix_tokens = line.tokens("num_prefix_tokens", 0, num_prompt_tokens)
        prefix = prefix_of(str(name), num_prefix_tokens)
    return TraceRequest(
        line.seconds("arrival_s"), num_prompt_tokens, line.tokens("num_output_tokens"), prefix
    )


@functools.lru_cache(1 << 16)
def prefix_of(name: str, num_tokens: int) -> tuple[int, ...]:
    """Return the entries of a shared start: others of the same name begin alike. One object for all
    requests that share it whole.
    """
    rng = random.Random(name)
    return tuple(rng.getrandbits(62) for _ in range(num_tokens // PREFIX_UNIT_TOKENS))


def _parse_mooncake(line: _Line) -> TraceRequest:
    num_prompt_tokens = line.tokens("input_length")
    hash_ids = line.fields.get("hash_ids", [])
    if not isinstance(hash_ids, list) or not all(type(each) is int for each in hash_ids):
        raise line.error(f"hash_ids is {_shown(hash_ids)}, must be a list of integers")
    if len(hash_ids) > num_prompt_tokens:
        raise line.error(
            f"hash_ids has {len(hash_ids)} entries, must have at most input_length of them"
        )
    return TraceRequest(
        line.seconds("timestamp", 1e-3),
        num_prompt_tokens,
        line.tokens("output_length"),
        tuple(hash_ids),
    )


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of token counts: N, uniform:LOW:HIGH, or lognormal:MEAN:CV, whose CV is
    standard deviation / mean.
    """

    kind: str
    first: float
    second: float = 0.0

    def draw(self, rng: random.Random) -> int:
        """Return one of them, from 1 to MAX_TOKENS."""
        if self.kind == "fixed":
            return int(self.first)
        if self.kind == "uniform":
            return rng.randint(int(self.first), int(self.second))
        sigma = math.sqrt(math.log1p(self.second**2))
        value = rng.lognormvariate(math.log(self.first) - sigma**2 / 2, sigma)
        return min(MAX_TOKENS, max(1, round(value)))


def parse_lengths(text: str) -> Lengths:
    """Read what `Lengths` says. Raises ValueError."""
    kind, *numbers = text.split(":") if ":" in text else ("fixed", text)
    forms = {"fixed": 1, "uniform": 2, "lognormal": 2}
    try:
        values = [float(number) for number in numbers]
    except ValueError:
        values = []
    if forms.get(kind) != len(values) or not all(map(math.isfinite, values)):
        raise ValueError(f"{text!r} is no distribution: N, uniform:LOW:HIGH or lognormal:MEAN:CV")
    # A CV of 0 is a fixed length, and above 10 the mean says nothing.
    limits = [(1, MAX_TOKENS), (0.0, 10.0) if kind == "lognormal" else (1, MAX_TOKENS)]
    for value, (low, high) in zip(values, limits, strict=False):
        if not low <= value <= high:
            raise ValueError(f"{text!r} has {value:g}, must be {low:g} to {high:g}")
    if kind == "uniform" and values[0] > values[1]:
        raise ValueError(f"{text!r}: LOW is above HIGH")
    return Lengths(kind, *values)


def draw_trace(
    *,
    num_requests: int,
    rate: float,
    prompt_tokens: Lengths,
    output_tokens: Lengths,
    num_prefixes: int = 0,
    prefix_tokens: int = 0,
    seed: int = 0,
) -> Trace:
    """Draw a trace with Poisson arrivals. With `num_prefixes`, each prompt begins with one of so
    many shared texts of `prefix_tokens` tokens, before its own. Raises ValueError.
    """
    if not 2 <= num_requests <= MAX_REQUESTS:
        raise ValueError(f"num_requests is {num_requests}, must be 2 to {MAX_REQUESTS}")
    if not (math.isfinite(rate) and rate > 0):
        raise ValueError(f"rate is {rate}, must be a number above 0")
    if num_prefixes < 0 or not 0 <= prefix_tokens <= MAX_TOKENS:
        raise ValueError("num_prefixes and prefix_tokens must be at least 0")
    rng = random.Random(seed)
    requests, arrival_s = [], 0.0
    for _ in range(num_requests):
        prefix: tuple[int, ...] = ()
        num_prompt_tokens = prompt_tokens.draw(rng)
        if num_prefixes:
            prefix = prefix_of(f"{seed}/{rng.randrange(num_prefixes)}", prefix_tokens)
            num_prompt_tokens += prefix_tokens
        num_output_tokens = output_tokens.draw(rng)
        requests.append(TraceRequest(arrival_s, num_prompt_tokens, num_output_tokens, prefix))
        arrival_s += rng.expovariate(rate)
    return Trace(tuple(requests))
