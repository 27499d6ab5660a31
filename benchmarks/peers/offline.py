"""How `bench_cpu.py` has a system time cases: lines of JSON in, lines of JSON out.

Every system runs in a process and an environment of its own, so this needs only Python's library.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol


class Case(NamedTuple):
    """`batch` prompts of `prompt_len` tokens, then `num_steps` decode steps of all of them."""

    batch: int
    prompt_len: int
    num_steps: int


class Times(NamedTuple):
    """Seconds from the first request until each has its first token, and of each later step."""

    prefill_s: float
    step_s: list[float]


class Engine(Protocol):
    """A system as it is timed: tokens are chosen greedily, nothing is kept of earlier requests."""

    def add_request(self, request_id: str, prompt: Sequence[int], max_tokens: int) -> None: ...

    def step(self) -> set[str]:
        """Run a step and return the requests that have got a token by it."""

    def abort_all(self) -> None: ...


def serve(load: Callable[[], Engine]) -> None:
    """Load a system and let it make a token, say so, then time the cases that come in."""
    # What libraries print goes elsewhere.
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1) as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        engine = load()
        run_case(engine, Case(batch=1, prompt_len=8, num_steps=0))
        print(json.dumps("ready"), file=answers)
        for line in sys.stdin:
            print(json.dumps(run_case(engine, Case(*json.loads(line)))), file=answers)


def run_case(engine: Engine, case: Case) -> Times:
    """Time one case; the engine has no requests before and after."""
    started = time.perf_counter()
    waiting = {str(index) for index in range(case.batch)}
    for index in range(case.batch):
        prompt = [(7 * i + 13 * index) % 1_000 + 2 for i in range(case.prompt_len)]
        # The first prompts decode while the last ones are computed.
        engine.add_request(str(index), prompt, max_tokens=case.num_steps + case.batch + 1)
    while waiting:
        waiting -= engine.step()
    prefill_s = time.perf_counter() - started
    step_s = [time_step(engine) for _ in range(case.num_steps)]
    engine.abort_all()
    return Times(prefill_s, step_s)


def time_step(engine: Engine) -> float:
    started = time.perf_counter()
    engine.step()
    return time.perf_counter() - started
