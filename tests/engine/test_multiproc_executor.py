"""An engine whose ranks are processes: what only they show."""

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tokenizers import Tokenizer

from pdserve_common.errors import FailedPreconditionError
from pdserve_common.types.engine import EngineCoreRequest
from pdserve_common.types.lora import LoRARequest
from pdserve_common.types.sampling_params import SamplingParams, StructuredOutputsParams
from pdserve_engine import assemble as loading
from pdserve_engine.assemble import LoadedEngine
from pdserve_engine.config import EngineConfig
from pdserve_engine.executor import multiproc
from pdserve_engine.executor.build import check_equal
from pdserve_engine.executor.multiproc import MultiprocExecutor, rank_configs
from pdserve_engine.lora.adapter_config import LoraError
from pdserve_engine.runner.load.model_source import ModelSource
from pdserve_engine.runner.rank_calls import (
    RestoreKVCache,
    RestoreWeights,
    SleepRank,
    StartProfile,
    StopProfile,
)
from pdserve_kernels.cpu.compiled import library_file
from support import engines, requests
from support.adapters import write_adapter
from support.waiting import stop_process, wait_until

PROMPT = tuple(range(3, 40))


def load(model: Path, **fields: Any) -> LoadedEngine:
    defaults = {"dtype": "bfloat16", "num_blocks": 64, "max_model_len": 256}
    return engines.load(model, **{**defaults, **fields})


@pytest.fixture(scope="module")
def model(make_served_model: Callable[..., Path]) -> Path:
    return make_served_model("LlamaForCausalLM")


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedEngine]:
    """Two ranks, with a KV transport each."""
    profiles = tmp_path_factory.mktemp("profiles")
    engine = load(model, tensor_parallel_size=2, kv_connector="nixl", profile_dir=str(profiles))
    ranks = [psutil.Process(pid) for pid in executor_of(engine).pids]
    yield engine
    engine.close()
    _, alive = psutil.wait_procs(ranks, timeout=60)
    assert not alive


def executor_of(engine: LoadedEngine) -> MultiprocExecutor:
    assert isinstance(engine.core.executor, MultiprocExecutor)
    return engine.core.executor


def make_request(name: str, lora: LoRARequest | None = None, **fields: Any) -> EngineCoreRequest:
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=16, **fields)
    return requests.make_request(
        name, PROMPT, params, cache_salt=name, lora_request=lora, eos_token_id=1
    )


def tokens_of(
    engine: LoadedEngine, name: str, lora: LoRARequest | None = None, **fields: Any
) -> list[int]:
    return engines.generate(engine.core, [make_request(name, lora, **fields)])[name]


def test_it_sleeps_profiles_and_shows_its_blocks_as_one_rank_does(
    engine: LoadedEngine, model: Path
) -> None:
    whole = load(model)
    expected = tokens_of(whole, "a", ignore_eos=True)
    core, executor = engine.core, engine.core.executor
    core.wait_for(executor.collective_rpc_behind_steps(StartProfile()))
    assert tokens_of(engine, "a", ignore_eos=True) == expected
    paths = core.wait_for(executor.collective_rpc_behind_steps(StopProfile()))
    assert all(Path(path).is_file() for path in paths)
    with pytest.raises(FailedPreconditionError):
        core.wait_for(executor.collective_rpc_behind_steps(StopProfile()))
    blocks = range(8)
    assert executor.block_checksums(blocks) == whole.core.executor.block_checksums(blocks)
    assert whole.close()
    core.scheduler.kv.block_pool.reset_prefix_cache()
    assert sum(executor.collective_rpc(SleepRank(2))) >= 0
    executor.collective_rpc(RestoreWeights())
    executor.collective_rpc(RestoreKVCache())
    assert tokens_of(engine, "b", ignore_eos=True) == expected


def test_a_grammar_is_rank_0s_matter(engine: LoadedEngine, model: Path) -> None:
    constraint = StructuredOutputsParams(regex="[a-f]{6}")
    tokens = tokens_of(engine, "a", structured_outputs=constraint)
    text = Tokenizer.from_file(str(model / "tokenizer.json")).decode(tokens)
    assert re.fullmatch("[a-f]{6}", text)


def test_a_step_that_fails_everywhere_is_its_requests_fault(engine: LoadedEngine) -> None:
    expected = tokens_of(engine, "a", ignore_eos=True)
    # Nothing that came over the wire has such a table.
    bad = make_request("bad", bad_words_token_ids=((10**9,),))
    outputs = engines.run_to_end(engine.core, [bad])["bad"]
    errors = [output.error for output in outputs if output.error is not None]
    (error,) = errors
    assert "the model failed on this request" in error.message
    assert engine.core.executor.failure() is None
    assert tokens_of(engine, "b", ignore_eos=True) == expected


def test_a_rank_that_is_killed_ends_the_engine(model: Path) -> None:
    engine = load(model, tensor_parallel_size=2)
    try:
        executor = executor_of(engine)
        os.kill(executor.pids[1], signal.SIGKILL)
        wait_until(lambda: executor.failure() is not None)
        assert executor.failure() == "rank 1 is gone: it was ended by SIGKILL"
        with pytest.raises(RuntimeError, match="rank 1 is gone"):
            tokens_of(engine, "a")
    finally:
        engine.close()


def test_ranks_end_at_once_whatever_an_interpreter_would_do_at_its_end(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With torch that takes seconds on a busy machine, and a worker that ends waits for it."""
    source = "import atexit, time\natexit.register(time.sleep, 3600)\n"
    (tmp_path / "sitecustomize.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(multiproc, "EXIT_TIMEOUT_S", 60.0)
    assert load(model, tensor_parallel_size=2).close()
    assert "is killed" not in caplog.text


def test_ranks_that_run_other_code_are_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = library_file()
    monkeypatch.setenv("PDSERVE_CPU_ISA", "reference")  # this process has its kernels already
    expected = f"CPU kernels of rank 0 is none, the engine's is {kernels}"
    with pytest.raises(ValueError, match=expected):
        load(model, tensor_parallel_size=2)


def test_so_are_ranks_that_find_another_model(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class OtherSource(ModelSource):
        """A model that changes behind the engine's look at it."""

        def _hash(self) -> str:
            return "another"

    monkeypatch.setattr(loading, "ModelSource", OtherSource)
    with pytest.raises(
        ValueError, match=r"compatibility_hash of rank 0 is \w+, the engine's is an"
    ):
        load(model, tensor_parallel_size=2)


def test_differences_are_named() -> None:
    ours = {"a": 1, "b": 2}
    check_equal("the engine", ours, [ours, dict(ours)])
    with pytest.raises(ValueError, match="b of rank 1 is 3, the engine's is 2"):
        check_equal("the engine", ours, [ours, ours | {"b": 3}])
    with pytest.raises(ValueError, match="b of rank 0 is None, the engine's is 2"):
        check_equal("the engine", ours, [{"a": 1}])
    with pytest.raises(ValueError, match="c of rank 0 is 3, the engine's is None"):
        check_equal("the engine", ours, [ours | {"c": 3}])


def test_a_rank_that_is_killed_ends_what_reads_and_uses_adapters(
    model: Path, tmp_path: Path
) -> None:
    folder = write_adapter(model, tmp_path / "a")
    engine = load(model, tensor_parallel_size=2, lora=(f"a={folder}",), max_loras=2)
    try:
        (adapter,) = engine.control.adapters.adapters
        lora = LoRARequest(lora_name="a", digest=adapter.digest)
        assert tokens_of(engine, "a", lora) != tokens_of(engine, "base")
        executor = executor_of(engine)
        assert executor.adapters is not None
        stop_process(executor.pids[1])
        reading = executor.adapters.read(folder)
        executor.adapters.discard(reading)
        os.kill(executor.pids[1], signal.SIGKILL)
        with pytest.raises(RuntimeError, match="rank 1 is gone: it was ended by SIGKILL"):
            reading.result(60)
        with pytest.raises(RuntimeError, match="rank 1 is gone"):
            tokens_of(engine, "b", lora)
    finally:
        engine.close()


def test_adapters_that_a_rank_cannot_serve_leave_nothing_behind(
    model: Path, tmp_path: Path
) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    folder = write_adapter(model, tmp_path / "a", r=9)
    fields = {"lora": (f"a={folder}",), "max_lora_rank": 8}
    with pytest.raises(LoraError, match=f"adapter {folder}: .* 9"):
        load(model, tensor_parallel_size=2, **fields)
    left = {child.pid for child in psutil.Process().children(recursive=True)} - before
    assert not left


def test_ranks_that_cannot_load_leave_nothing_behind(model: Path) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with pytest.raises(ValueError, match=r"the KV pool of .* does not fit"):
        load(model, tensor_parallel_size=2, num_blocks=1 << 28)
    left = {child.pid for child in psutil.Process().children(recursive=True)} - before
    assert not left


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"num_threads": 5}, [(None, 2), (None, 2)]),
        ({"num_threads": 1}, [(None, 1), (None, 1)]),
        ({"cpu_cores": "0-1"}, [("0", 0), ("1", 0)]),
    ],
)
def test_ranks_share_threads_and_cores(
    fields: dict[str, object], expected: list[tuple[str | None, int]]
) -> None:
    config = EngineConfig(tensor_parallel_size=2, **fields)  # type: ignore[arg-type]
    assert [(rank.cpu_cores, rank.num_threads) for rank in rank_configs(config)] == expected


def test_too_few_cores_are_refused() -> None:
    with pytest.raises(ValueError, match="cpu_cores is 0, they cannot be shared out among 2 ranks"):
        rank_configs(EngineConfig(tensor_parallel_size=2, cpu_cores="0"))
