"""Engines with tiers of KV besides a pool that is too small for their conversations."""

import functools
import itertools
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from pdserve_common.types.engine import PauseMode
from pdserve_common.types.verbs import ResetPrefixCache, Sleep, WakeUp
from pdserve_engine.config import EngineConfig
from pdserve_engine.kv_offload.offload import KVOffload
from pdserve_engine.runner.operate.control import HANDLERS, Wait
from support.engines import generate_greedily, load
from support.metrics import samples_of, total
from support.samples import sampled
from support.waiting import wait_until

BLOCK_SIZE = 4
# Of fp32, as `make_model` has them.
NUM_BLOCKS = 64
NUM_OUTPUT = 6
MIB = 1 << 20
SLIDING = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    "sliding_window": 16,
}
TIERS = ("host", "disk", "both")


class Runner:
    """One engine whose pool has few blocks."""

    def __init__(self, model: Path, **overrides: object) -> None:
        settings: dict[str, object] = {
            "num_blocks": NUM_BLOCKS,
            "block_size": BLOCK_SIZE,
            "max_model_len": 120,
            "max_num_batched_tokens": 32,
            # However busy the machine is.
            "kv_offload_timeout_s": 60.0,
            "poison_freed_blocks": True,
            **overrides,
        }
        self.registry = CollectorRegistry()
        self.loaded = load(model, registry=self.registry, **settings)
        self.core = self.loaded.core
        self._names = map(str, itertools.count())

    def ask(self, *prompts: list[int]) -> list[list[int]]:
        """Return the answers; the prompts are computed together."""
        asked = {next(self._names): prompt for prompt in prompts}
        answers = generate_greedily(self.loaded, asked, NUM_OUTPUT)
        return [answers[name] for name in asked]

    def _step(self) -> None:
        assert not (self.core.step() if self.core.has_work() else self.core.poll()).outputs

    def store(self) -> None:
        """Wait until what was offered is in the tiers."""

        def is_stored() -> bool:
            self._step()
            pool = self.core.scheduler.kv.block_pool
            return pool.num_free_blocks == pool.num_blocks and not self.offload.num_open_stores()

        wait_until(is_stored)

    @property
    def offload(self) -> KVOffload:
        assert self.loaded.offload is not None
        return self.loaded.offload

    def evict(self) -> None:
        """Nothing is cached in the pool any more."""
        self.store()
        assert self.core.scheduler.kv.block_pool.reset_prefix_cache()

    def metric(self, name: str) -> float:
        return total(samples_of(generate_latest(self.registry).decode()), name)

    def num_loaded(self) -> float:
        return self.metric('pdserve_kv_offload_tokens_total{outcome="loaded"}')

    def control(self, verb: object) -> object:
        handler = HANDLERS[type(verb)](self.loaded.control, verb)  # type: ignore[index]
        try:
            while True:
                wait = handler.send(None)
                wait_until(functools.partial(self._is_met, wait))
        except StopIteration as end:
            return end.value

    def _is_met(self, wait: Wait) -> bool:
        self._step()
        return wait.condition()

    def close(self) -> None:
        self.core.scheduler.kv.check_integrity()
        assert self.loaded.close()


def settings(tiers: str, folder: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    if tiers in ("host", "both"):
        found["kv_offload_host_bytes"] = MIB
    if tiers in ("disk", "both"):
        found |= {"kv_offload_disk_path": str(folder), "kv_offload_disk_bytes": 2 * MIB}
    return found


@contextmanager
def running(model: Path, **overrides: object) -> Iterator[Runner]:
    runner = Runner(model, **overrides)
    try:
        yield runner
    finally:
        runner.close()


@pytest.fixture
def model(make_model: Callable[..., Path]) -> Path:
    return make_model("LlamaForCausalLM")


def words(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(3, 90) for _ in range(num_tokens)]


@pytest.mark.parametrize(
    ("tiers", "is_async", "seed"),
    sampled(
        [
            (tiers, is_async, seed)
            for tiers in TIERS
            for is_async in (False, True)
            for seed in (1, 2)
        ],
        ("host", False, 1),
        ("disk", True, 1),
        ("both", False, 2),
    ),
)
def test_conversations_that_come_back_get_the_same_tokens(
    model: Path, tmp_path: Path, tiers: str, is_async: bool, seed: int
) -> None:
    """More of them than the pool holds, of random lengths, several at once."""
    rng = random.Random(seed)
    chats = [words(rng, rng.randrange(8, 40)) for _ in range(8)]
    with (
        running(
            model, num_blocks=32, async_scheduling=is_async, **settings(tiers, tmp_path)
        ) as with_tiers,
        running(model, enable_prefix_caching=False, num_blocks=200) as without,
    ):
        for _ in range(12):
            chosen = rng.sample(chats, rng.randrange(1, 4))
            answers = with_tiers.ask(*chosen)
            assert answers == without.ask(*chosen)
            for chat, answer in zip(chosen, answers, strict=True):
                chat += [*answer, *words(rng, rng.randrange(1, 6))]
                if len(chat) > 100:
                    chat[:] = words(rng, 20)
            with_tiers.store()
        assert with_tiers.num_loaded() > 50
        assert with_tiers.metric("pdserve_kv_offload_bad_blocks_total") == 0


def test_what_comes_from_a_tier_is_what_transformers_says(
    model: Path, tmp_path: Path, hf_greedy: Callable[..., list[int]]
) -> None:
    prompt = words(random.Random(7), 60)
    with running(model, **settings("disk", tmp_path)) as runner:
        runner.ask(prompt)
        runner.evict()
        assert runner.ask(prompt) == [hf_greedy(model, prompt, NUM_OUTPUT)]
        assert runner.num_loaded() == 56


def test_a_restarted_engine_finds_its_blocks(model: Path, tmp_path: Path) -> None:
    prompt = words(random.Random(3), 50)
    with running(model, **settings("both", tmp_path)) as first:
        answers = first.ask(prompt)
    with running(model, **settings("both", tmp_path)) as second:
        assert second.ask(prompt) == answers
        assert second.num_loaded() == 48
        second.evict()
        shutil.rmtree(tmp_path)  # the faster tier has them by now
        assert second.ask(prompt) == answers
        assert second.num_loaded() == 96


def test_another_models_blocks_are_never_used(
    make_model: Callable[..., Path],
    model: Path,
    tmp_path: Path,
    hf_greedy: Callable[..., list[int]],
) -> None:
    prompt = words(random.Random(4), 50)
    other = make_model("LlamaForCausalLM", rope_theta=5000.0)
    with running(other, **settings("disk", tmp_path)) as runner:
        runner.ask(prompt)
    with running(model, **settings("disk", tmp_path)) as runner:
        assert runner.ask(prompt) == [hf_greedy(model, prompt, NUM_OUTPUT)]
        assert runner.num_loaded() == 0


Fault = Callable[[list[Path]], None]


def cut(files: list[Path]) -> None:
    os.truncate(files[5], 100)


def flip(files: list[Path]) -> None:
    content = bytearray(files[5].read_bytes())
    content[len(content) // 2] ^= 1
    files[5].write_bytes(content)


def swap(files: list[Path]) -> None:
    """A whole block under another one's name."""
    files[5].write_bytes(files[6].read_bytes())


def remove_one(files: list[Path]) -> None:
    files[5].unlink()


def remove_all(files: list[Path]) -> None:
    shutil.rmtree(files[0].parent)


def make_link(files: list[Path]) -> None:
    files[5].unlink()
    files[5].symlink_to(files[6])


@pytest.mark.parametrize("fault", [cut, flip, swap, remove_one, remove_all, make_link])
def test_a_block_that_is_not_whole_is_computed(model: Path, tmp_path: Path, fault: Fault) -> None:
    prompt = words(random.Random(5), 50)
    with running(model, **settings("disk", tmp_path)) as runner:
        answers = runner.ask(prompt)
        runner.evict()
        fault(sorted(tmp_path.rglob("*.kv"), key=lambda path: path.stat().st_mtime_ns))
        assert runner.ask(prompt) == answers
        assert runner.num_loaded() < 48
        assert runner.metric("pdserve_kv_offload_bad_blocks_total") == 1
        runner.evict()
        assert runner.ask(prompt) == answers
        runner.store()
        is_writable = runner.metric("pdserve_kv_offload_writable")
        assert is_writable == (fault is not remove_all)


def test_an_operator_empties_the_tiers(model: Path, tmp_path: Path) -> None:
    prompt = words(random.Random(6), 50)
    with running(model, **settings("both", tmp_path)) as runner:
        answers = runner.ask(prompt)
        runner.control(ResetPrefixCache())  # while blocks may be on their way
        assert runner.ask(prompt) == answers
        assert runner.num_loaded() == 0
        runner.store()
        assert list(tmp_path.rglob("*.kv"))
        runner.control(ResetPrefixCache())
        assert not list(tmp_path.rglob("*.kv"))
        assert runner.metric("pdserve_kv_offload_used_bytes") == 0


@pytest.mark.parametrize("level", [1, 2])
def test_tiers_outlive_a_sleep(model: Path, tmp_path: Path, level: int) -> None:
    """What is asleep has no pool; the weights that come back are the same, or none."""
    prompt = words(random.Random(8), 50)
    with running(model, **settings("host", tmp_path)) as runner:
        answers = runner.ask(prompt)
        runner.store()
        runner.control(Sleep(level=level, mode=PauseMode.KEEP))
        runner.control(WakeUp())
        assert runner.ask(prompt) == answers
        assert runner.num_loaded() == 48


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"kv_offload_disk_bytes": 0}, "both must be set, or none"),
        ({"kv_offload_host_bytes": -1}, "kv_offload_host_bytes is -1, must be at least 0"),
        ({"kv_offload_timeout_s": 0.0}, "kv_offload_timeout_s is 0.0, must be above 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    tmp_path: Path, overrides: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**(settings("disk", tmp_path) | overrides))  # type: ignore[arg-type]


def test_a_folder_is_one_engines(model: Path, tmp_path: Path) -> None:
    with (
        running(model, **settings("disk", tmp_path)),
        pytest.raises(ValueError, match="which another process uses"),
    ):
        Runner(model, **settings("disk", tmp_path))
