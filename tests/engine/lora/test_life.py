"""Adapters that come and go while an engine serves: here, in a process of its own, over ranks."""

import asyncio
import contextlib
import dataclasses
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from pdserve_common.errors import (
    AdapterNotHeldError,
    FailedPreconditionError,
    InvalidRequestError,
)
from pdserve_common.types.capabilities import Capabilities, check_served
from pdserve_common.types.engine import EngineCoreRequest, ErrorCode, Generate
from pdserve_common.types.lora import LoRAAdapter, LoRARequest
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_common.types.verbs import (
    AddLora,
    ListLoras,
    PinLora,
    RemoveLora,
    Sleep,
    UnpinLora,
    WakeUp,
)
from pdserve_engine.clients.launch import WorkerEngine
from pdserve_engine.runner.load import model_source
from support import engines
from support.adapters import merged_greedy, write_adapter
from support.engines import LONG, launched, until_idle
from support.hub import FakeHub
from support.waiting import until

PROMPT = list(range(2, 50))
NUM_TOKENS = 12

pytestmark = pytest.mark.asyncio(loop_scope="module")


def in_soak(*kinds: str) -> list[Any]:
    """All kinds, these in `make soak` only: other tests here go their way."""
    return [
        pytest.param(kind, marks=[pytest.mark.soak] if kind in kinds else [])
        for kind in ("inproc", "subprocess", "ranks")
    ]


@pytest.fixture(scope="module")
def model(make_model: Callable[..., Path]) -> Path:
    return make_model("Qwen3ForCausalLM", max_position_embeddings=LONG + 2 * len(PROMPT))


@pytest.fixture(scope="module")
def root(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders "a", "b/deep", "c", each another adapter, and what is none."""
    root = tmp_path_factory.mktemp("root")
    for seed, name in enumerate(("a", "b/deep", "c")):
        write_adapter(model, root / name, seed=seed, r=4 + seed)
    outside = tmp_path_factory.mktemp("outside")
    shutil.copytree(root / "a", outside / "adapter")
    (root / "link").symlink_to(outside / "adapter")
    (root / "empty").mkdir()
    (root / "loop").symlink_to(root / "loop")
    return root


@pytest.fixture(scope="module", params=in_soak())
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def started(
    model: Path, kind: str, **fields: Any
) -> contextlib.AbstractAsyncContextManager[WorkerEngine]:
    is_cut = kind == "ranks"
    where = {"tensor_parallel_size": 2} if is_cut else {"engine_process": kind}
    return launched(
        model,
        dtype="float32",
        kv_cache_memory_mib=8,
        max_num_seqs=4,
        max_loras=2,
        **where,
        **fields,
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(model: Path, root: Path, kind: str) -> AsyncIterator[WorkerEngine]:
    async with started(model, kind, lora_root=str(root)) as engine:
        yield engine


@pytest_asyncio.fixture(loop_scope="module")
async def engine(shared: WorkerEngine) -> AsyncIterator[WorkerEngine]:
    """The shared engine, without adapters before and after."""
    assert shared.info.adapters == ()
    yield shared
    for name in {each.name for each in shared.info.adapters if each.name}:
        await shared.call(RemoveLora(lora_name=name))
    await until(lambda: shared.stats().num_loras == 0)


class Client(engines.Client):
    """A front end of an engine, all of whose requests have one prompt."""

    def add(
        self, name: str, max_tokens: int = NUM_TOKENS, adapter: LoRAAdapter | None = None
    ) -> EngineCoreRequest:
        lora = None
        if adapter is not None:
            lora = LoRARequest(lora_name=adapter.name, digest=adapter.digest)
        return super().add(name, max_tokens, PROMPT, lora_request=lora)


def adding(name: str, path: str = "", digest: str = "") -> AddLora:
    return AddLora(lora_request=LoRARequest(lora_name=name, lora_path=path, digest=digest))


async def test_an_adapter_is_added_used_and_removed(
    engine: WorkerEngine,
    model: Path,
    root: Path,
    hf_greedy: Callable[..., list[int]],
) -> None:
    client = Client(engine)
    version, before = engine.info.adapters_version, engine.stats()
    adapter = await engine.call(adding("a"))
    assert (adapter.name, adapter.rank, len(adapter.digest)) == ("a", 4, 64)
    assert adapter.path == "a"
    assert engine.info.adapters == (adapter,)
    assert engine.info.adapters_version > version
    deep = await engine.call(adding("deep one", "b/deep"))
    assert engine.info.adapters == (adapter, deep)
    assert await client.run("with", adapter=adapter) == merged_greedy(
        model, root / "a", PROMPT, NUM_TOKENS
    )
    assert await client.run("other", adapter=deep) == merged_greedy(
        model, root / "b" / "deep", PROMPT, NUM_TOKENS
    )
    assert await client.run("base") == hf_greedy(model, PROMPT, NUM_TOKENS)
    assert {each.adapter: each.num_requests for each in await engine.call(ListLoras())} == {
        adapter: 0,
        deep: 0,
    }
    await until(lambda: engine.stats().num_loras == 2)
    assert engine.stats().num_lora_loads == before.num_lora_loads + 2
    # A step for each token of the two that have adapters, none for the third.
    assert engine.stats().num_lora_steps == before.num_lora_steps + 2 * NUM_TOKENS
    await engine.call(RemoveLora(lora_name="a"))
    assert engine.info.adapters == (deep,)
    with pytest.raises(AdapterNotHeldError):
        check_served(
            EngineCoreRequest(
                request_id="r",
                prompt_token_ids=(1,),
                task=Generate(SamplingParams()),
                lora_request=LoRARequest(lora_name="a", digest=adapter.digest),
            ),
            Capabilities.of(engine.info),
        )
    # One that was checked before gets the same answer from the engine itself, and holds nothing.
    client.add("late", adapter=adapter)
    end = await client.end_of("late")
    assert end.error is not None
    assert (end.error.code, end.error.is_retryable) == (ErrorCode.FAILED_PRECONDITION, True)
    assert client.tokens("late") == []
    await until_idle(engine)
    client.close()


async def test_a_running_request_keeps_what_was_replaced_or_removed(
    engine: WorkerEngine, model: Path, root: Path
) -> None:
    client = Client(engine)
    old = await engine.call(adding("a"))
    await client.start("old", adapter=old)
    new = await engine.call(adding("a", "c"))
    assert new.digest != old.digest
    assert {(each.name, each.digest) for each in engine.info.adapters} == {
        ("a", new.digest),
        ("", old.digest),
    }
    assert await client.run("new", adapter=new) == merged_greedy(
        model, root / "c", PROMPT, NUM_TOKENS
    )
    await client.start("new too", adapter=new)
    with pytest.raises(FailedPreconditionError, match="at most 2 may be"):
        await engine.call(adding("b", "b/deep"))
    await engine.call(RemoveLora(lora_name="a"))
    assert engine.info.adapters == ()
    assert engine.stats().num_running_reqs == 2
    removed = await engine.call(ListLoras())
    assert [(each.is_removed, each.num_requests) for each in removed] == [(True, 1), (True, 1)]
    for request_id, folder in (("old", "a"), ("new too", "c")):
        wanted = len(client.tokens(request_id)) + 4 * NUM_TOKENS
        await until(lambda: len(client.tokens(request_id)) >= wanted)  # noqa: B023
        expected = merged_greedy(model, root / folder, PROMPT, wanted)
        assert client.tokens(request_id)[:wanted] == expected
        client.abort(request_id)
    await until(lambda: engine.stats().num_running_reqs == 0)
    assert await engine.call(ListLoras()) == ()
    client.close()


async def test_what_is_pinned_stays_and_what_was_not_used_goes(engine: WorkerEngine) -> None:
    evicted = engine.stats().num_lora_evictions
    first = await engine.call(adding("a"))
    await engine.call(PinLora(lora_name="a"))
    await engine.call(adding("b", "b/deep"))
    kept = engine.info.adapters
    full = dataclasses.replace(adding("c"), keep_others=True)
    with pytest.raises(FailedPreconditionError, match="2 adapters are loaded, to be kept, at most"):
        await engine.call(full)
    assert engine.info.adapters == kept
    third = await engine.call(adding("c"))
    assert engine.info.adapters == (first, third)
    listed = await engine.call(ListLoras())
    assert {each.adapter.name: each.is_pinned for each in listed} == {"a": True, "c": False}
    await until(lambda: engine.stats().num_lora_evictions == evicted + 1)
    await engine.call(UnpinLora(lora_name="a"))
    assert not any(each.is_pinned for each in await engine.call(ListLoras()))
    second = await engine.call(adding("b", "b/deep"))
    assert engine.info.adapters == (third, second)
    with pytest.raises(FailedPreconditionError, match="lora_name is 'a', no adapter of it"):
        await engine.call(UnpinLora(lora_name="a"))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("../outside", "must be the path of a folder below lora_root"),
        ("a/../../x", "must be the path of a folder below lora_root"),
        ("/etc", "must be the path of a folder below lora_root"),
        ("a\0b", "must be the path of a folder below lora_root"),
        ("a\nb", "must be the path of a folder below lora_root"),
        (".", "does not lead below lora_root"),
        ("link", "does not lead below lora_root"),
        ("x" * 1025, "at most 1024 are served"),
        ("x" * 1000, "cannot be read: File name too long"),
        ("loop", "does not lead|no such folder|cannot be read"),
        ("nowhere", "no such folder"),
        ("a/adapter_config.json", "no such folder"),
        ("empty", "adapter_config.json cannot be read"),
    ],
)
async def test_what_is_no_adapter_below_the_root_is_refused(
    engine: WorkerEngine, root: Path, path: str, message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message) as refusal:
        await engine.call(adding("a", path))
    assert str(root) not in str(refusal.value)
    assert engine.info.adapters == ()
    assert engine.is_alive()


async def test_a_digest_that_is_asked_for_has_to_be_the_folders(engine: WorkerEngine) -> None:
    with pytest.raises(InvalidRequestError, match="digest is 'ab', the folder's is"):
        await engine.call(adding("a", digest="ab"))
    assert engine.info.adapters == ()
    adapter = await engine.call(adding("a"))
    again = await engine.call(adding("again", "a", digest=adapter.digest))
    assert again == dataclasses.replace(adapter, name="again")
    assert engine.stats().num_loras <= 1


async def test_asleep_it_loads_nothing_and_keeps_what_it_has(engine: WorkerEngine) -> None:
    client = Client(engine)
    adapter = await engine.call(adding("a"))
    tokens = await client.run("before", adapter=adapter)
    await engine.call(Sleep(level=2))
    with pytest.raises(FailedPreconditionError, match="asleep at level 2"):
        await engine.call(adding("c"))
    await engine.call(WakeUp())
    assert engine.info.adapters == (adapter,)
    assert await client.run("after", adapter=adapter) == tokens
    client.close()


async def test_an_add_whose_caller_gives_up_adds_nothing(engine: WorkerEngine) -> None:
    call = asyncio.create_task(engine.call(adding("a")))
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.wait([call])
    # What is under way in a process of its own hears of it a little later.
    listed = None
    while listed is None:
        with contextlib.suppress(FailedPreconditionError):
            listed = await engine.call(ListLoras())
        await asyncio.sleep(0.01)
    assert [each.adapter for each in listed] == list(engine.info.adapters) == []


@pytest.mark.parametrize("kind", in_soak("subprocess", "ranks"), indirect=True)
async def test_those_of_the_config_are_there_from_the_start_and_stay(
    model: Path, root: Path, kind: str
) -> None:
    folders = {"lora": (f"a={root / 'a'}", f"c={root / 'c'}"), "lora_root": str(root)}
    async with started(model, kind, **folders) as engine:
        assert [each.name for each in engine.info.adapters] == ["a", "c"]
        # Their folders are this worker's own.
        assert {each.path for each in engine.info.adapters} == {""}
        with pytest.raises(FailedPreconditionError, match="pinned or in use"):
            await engine.call(adding("b", "b/deep"))
        await engine.call(RemoveLora(lora_name="a"))
        await engine.call(adding("b", "b/deep"))
        assert [each.name for each in engine.info.adapters] == ["c", "b"]


async def test_adapters_of_the_hub_are_loaded_where_that_is_on(
    model: Path, root: Path, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = FakeHub(root / "a", tmp_path)
    for name, value in hub.environment.items():
        monkeypatch.setenv(name, value)
    path = f"hf://{hub.model}@{hub.COMMIT}"
    async with started(model, kind, lora=(f"first={path}",), lora_hub=True) as engine:
        (first,) = engine.info.adapters
        # What it is called by says nothing of where it comes from.
        second = await engine.call(adding("second", path, digest=first.digest))
        assert second == LoRAAdapter(name="second", digest=first.digest, rank=4, path=path)
        for wrong in ("hf://nobody", f"hf://{hub.model}@v2"):
            with pytest.raises(InvalidRequestError):
                await engine.call(adding("third", wrong))
        with pytest.raises(FailedPreconditionError, match="lora_root is not set"):
            await engine.call(adding("third", "a"))
        hub.close()
        with pytest.raises(FailedPreconditionError, match="did not bring it"):
            await engine.call(adding("third", f"hf://{hub.model}@main"))
        assert engine.info.adapters == (first, second)


async def test_nothing_of_the_hub_is_loaded_where_that_is_off(engine: WorkerEngine) -> None:
    path = f"hf://owner/name@{FakeHub.COMMIT}"
    with pytest.raises(FailedPreconditionError, match="lora_hub is off"):
        await engine.call(adding("a", path))


@pytest.mark.parametrize("kind", in_soak("ranks"), indirect=True)
async def test_a_download_ends_with_who_asked_and_may_be_looked_at(
    model: Path, root: Path, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = FakeHub(root / "a", tmp_path)
    for name, value in hub.environment.items():
        monkeypatch.setenv(name, value)
    hub.holds_files = True
    async with started(model, kind, lora_hub=True) as engine:
        call = asyncio.create_task(engine.call(adding("a", f"hf://{hub.model}@main")))
        await until(lambda: any(each.startswith("GET") for each in hub.file_requests()))
        # Who only reads is not kept waiting; what changes something is.
        assert await engine.call(ListLoras()) == ()
        with pytest.raises(FailedPreconditionError, match="cannot remove lora: add lora is under"):
            await engine.call(RemoveLora(lora_name="a"))
        call.cancel()
        await asyncio.wait([call])
        hub.holds_files = False
        # The next one has its turn; what is in a process of its own hears of it a little later.
        while not engine.info.adapters:
            with contextlib.suppress(FailedPreconditionError):
                await engine.call(adding("b", f"hf://{hub.model}@main"))
            await asyncio.sleep(0.01)
        assert [each.name for each in engine.info.adapters] == ["b"]
    hub.close()


async def test_a_defect_in_reading_an_adapter_refuses_it_and_nothing_else(
    model: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise ZeroDivisionError("a defect")

    async with started(model, "inproc", lora_root=str(root)) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(model_source, "read_adapter", fail)
            with pytest.raises(InvalidRequestError, match="cannot be read: ZeroDivisionError"):
                await engine.call(adding("a"))
        assert (await engine.call(adding("a"))).name == "a"
