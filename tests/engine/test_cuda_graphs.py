"""Steps that replay CUDA graphs: on a GPU, or with graphs that are recorded in the interpreter.

A replay must bring the tokens that the plain runner brings, whichever requests and adapters come
and go meanwhile.
"""

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve_common.types.sampling_params import SamplingParams
from support.adapters import write_adapter
from support.interpreted import interpreted_kernels, prompt_events
from support.model_driver import Driver, make_prompt
from support.recorded_graphs import Launches, have_few_graphs, recorded_graphs
from support.samples import sampled
from support.triton_kernels import in_the_interpreter

pytest.importorskip("triton")

NUM_LAYERS = 2
PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, top_k=5, top_p=0.9),
    # Looks back at its tokens: a step with it waits for those before.
    SamplingParams(temperature=0.0, repetition_penalty=1.5),
)
# All linears, some with more ranks, and few of some layers.
ADAPTERS: tuple[dict[str, Any], ...] = (
    {"r": 8},
    {"r": 14, "target_modules": ["v_proj", "up_proj", "down_proj"]},
    {"r": 3, "use_rslora": True, "layers_to_transform": [1]},
)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """Have few graphs, which are recorded."""
    have_few_graphs(monkeypatch, 1, 4)
    with prompt_events(), recorded_graphs() as launches:
        yield launches


@pytest.fixture
def folder(make_model: Callable[..., Path]) -> Path:
    return make_model("Qwen3ForCausalLM", num_hidden_layers=NUM_LAYERS)


@pytest.fixture
def adapters(folder: Path, tmp_path: Path) -> list[Path]:
    return [
        write_adapter(folder, tmp_path / str(seed), seed=seed, **config)
        for seed, config in enumerate(ADAPTERS)
    ]


def captured(folder: Path, kernels: Any = None, **options: Any) -> Driver:
    with interpreted_kernels(kernels):
        driver = Driver(folder, max_lora_rank=16, **options)
    driver.runner.capture_graphs()
    return driver


def num_replays(driver: Driver) -> dict[bool, int]:
    """How often graphs without and with adapters were replayed."""
    found = {False: 0, True: 0}
    graphs: Any = driver.runner
    for kind, of_kind in graphs.stepper.graphs.items():
        found[kind.has_lora] += sum(each.forward.num_replays for each in of_kind)
    return found


def num_draws(driver: Driver) -> int:
    """How often graphs that draw tokens were replayed."""
    runner: Any = driver.runner
    graphs = itertools.chain.from_iterable(runner.stepper.graphs.values())
    return sum(draw.graph.num_replays for each in graphs for draw in each.draws.values())


def num_kernels(driver: Driver, *, has_lora: bool) -> int:
    """How many of Triton's the largest graph of decodes launches."""
    runner: Any = driver.runner
    (graphs,) = (
        graphs
        for kind, graphs in runner.stepper.graphs.items()
        if kind.is_decode and kind.has_lora == has_lora
    )
    count: int = graphs[-1].forward.num_kernels
    return count


@in_the_interpreter
def test_steps_with_adapters_replay_what_brings_the_same_tokens(
    folder: Path, adapters: list[Path], launches: Launches
) -> None:
    """Requests with and without, that sample in all ways, come and go; and so do steps in which
    nobody has one.
    """
    rng = random.Random(0)
    plain = Driver(folder, adapters=adapters)
    replayed = captured(folder, adapters=adapters)
    plan = [(rng.choice([None, *adapters]), rng.randint(1, 14), i % 3) for i in range(6)]
    plan[0] = (None, 5, 0)
    outputs = []
    for driver in (plain, replayed):
        outputs.append({})
        for step in range(14):
            if step % 2 == 0 and step // 2 < len(plan):
                adapter, length, kind = plan[step // 2]
                name = str(step)
                driver.add(name, make_prompt(length), adapter=adapter, params=PARAMS[kind], seed=3)
            if step == 7:
                driver.preempt("4")
            if step in (8, 9):
                driver.finish(str(2 * (step - 7)))
            driver.step(dict.fromkeys(driver.sequences, 9))
            outputs[-1] |= {name: list(s.output) for name, s in driver.sequences.items()}
    assert outputs[1] == outputs[0]
    assert min(num_replays(replayed).values()) > 1


@in_the_interpreter
def test_nobody_waits_for_logprobs(
    folder: Path, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are, to the bit, those of steps that wait: of chunks, of decodes that replay a graph,
    and of more than any graph has room for.
    """
    from pdserve_kernels.triton import deterministic

    with interpreted_kernels(deterministic):
        waiting = Driver(folder)
    monkeypatch.setattr(waiting.runner.stepper, "launch", lambda model, step: None)
    launched = captured(folder, deterministic)

    def never_wait(*, wait: bool) -> None:
        assert not wait

    monkeypatch.setattr(launched.runner.stepper, "apply_launched", never_wait)
    answers = []
    for driver in (waiting, launched):
        outputs = []
        for step in range(5):
            if step in (0, 3):
                for i, num_top in enumerate((0, None, 3)):
                    params = SamplingParams(temperature=float(i % 2), logprobs=num_top)
                    name = f"{step}-{i}"
                    driver.add(name, make_prompt(4 + 5 * i), params=params, seed=i)
            outputs.append(driver.step(dict.fromkeys(driver.sequences, 8)))
        answers.append([(each.sampled_token_ids, each.logprobs) for each in outputs])
    assert answers[1] == answers[0]
    assert len(answers[1][-1][1]) == 4
    assert num_replays(launched)[False] > 1


@in_the_interpreter
def test_a_chunk_that_does_not_end_its_prompt_draws_nothing(
    folder: Path, launches: Launches
) -> None:
    plain, replayed = Driver(folder), captured(folder)
    outputs = []
    for driver in (plain, replayed):
        request = driver.add("a", make_prompt(13))
        for _ in range(3):
            driver.step({"a": 6})
        outputs.append(request.output)
    assert outputs[1] == outputs[0]
    assert len(outputs[0]) == 1
    assert num_replays(replayed)[False] == 3
    assert num_draws(replayed) == 1


@in_the_interpreter
def test_a_slot_s_next_adapter_is_in_the_graphs_that_are_there(
    folder: Path, adapters: list[Path], launches: Launches
) -> None:
    plain, replayed = Driver(folder, adapters=adapters), captured(folder, adapters=adapters[:2])
    names = dict(zip("abc", adapters, strict=True))
    outputs = []
    for driver in (plain, replayed):
        for name in "ab":
            driver.add(name, make_prompt(7), adapter=names[name])
        driver.run(*"ab", num_tokens=3)
        found = [driver.sequences[name].output for name in "ab"]
        driver.finish("a")
        driver.step({"b": 1})  # tells the runner that a is over
        driver.unload_adapter(names["a"])
        if driver is replayed:
            driver.load_adapter(names["c"])
        driver.add("c", make_prompt(7), adapter=names["c"])
        driver.run(*"bc", num_tokens=5)
        outputs.append([*found, *(driver.sequences[name].output for name in "bc")])
    assert outputs[1] == outputs[0]
    assert len(set(map(tuple, outputs[0]))) == 4


@in_the_interpreter
def test_a_step_with_adapters_launches_nothing_but_a_graph(
    folder: Path, adapters: list[Path], launches: Launches
) -> None:
    driver = captured(folder, adapters=adapters)
    for name, adapter in zip("abc", (adapters[0], None, adapters[1]), strict=True):
        driver.add(name, make_prompt(5), adapter=adapter)
    launches.count = 0
    driver.run(*"abc", num_tokens=4)
    assert launches.count == 0
    assert num_replays(driver) == {False: 0, True: 4}
    without, with_adapters = (num_kernels(driver, has_lora=has_lora) for has_lora in (False, True))
    # Two for each linear of a layer.
    assert with_adapters == without + 2 * 4 * NUM_LAYERS
    driver.runner.release_graphs()
    driver.run(*"abc", num_tokens=5)
    assert launches.count >= with_adapters - 1  # a graph spreads its block tables


@in_the_interpreter
@pytest.mark.soak
def test_deterministic_kernels_replay_the_bits_of_a_request_alone(
    folder: Path, adapters: list[Path], launches: Launches
) -> None:
    from pdserve_kernels.triton import deterministic

    def kv_of(*names: str) -> Any:
        """Return the KV of request a, which has an adapter, among others."""
        driver = captured(folder, deterministic, adapters=adapters)
        driver.cache.tensor.zero_()
        wanted = dict(zip("abcd", (adapters[1], None, adapters[1], adapters[0]), strict=True))
        for name in names:
            driver.add(name, make_prompt(5 + ord(name) - ord("a")), adapter=wanted[name])
        driver.run(*names, num_tokens=4, chunk=4 if len(names) > 1 else 100)
        assert num_replays(driver)[True] > 1
        return driver.cache.tensor[driver.sequences["a"].block_ids[0]]

    alone, among_others = kv_of("a"), kv_of(*"bdca")
    assert alone.any()
    assert torch.equal(alone, among_others)


@in_the_interpreter
@pytest.mark.parametrize(("num_places", "num_tokens"), sampled([(80, 70), (224, 200)], (80, 70)))
def test_a_chunk_of_many_blocks_of_queries_is_computed_whole(
    folder: Path,
    launches: Launches,
    monkeypatch: pytest.MonkeyPatch,
    num_places: int,
    num_tokens: int,
) -> None:
    """In a graph that has room for more requests: programs search for theirs among all of these."""
    from pdserve_engine.runner.run import graph_buffers as cuda_graphs

    monkeypatch.setattr(cuda_graphs, "CHUNK_TOKENS", (num_places,))
    with interpreted_kernels():
        eager = Driver(folder)
    states = []
    for driver in (eager, captured(folder)):
        driver.add("short", make_prompt(3))
        driver.add("long", make_prompt(num_tokens))
        driver.step({"short": 3, "long": num_tokens})
        # In the last layer: it sees what attention has made of the ones before.
        states.append(driver.cache.tensor[driver.sequences["long"].block_ids[0], :, -1])
    torch.testing.assert_close(*states, atol=0.02, rtol=0.02, equal_nan=True)
    assert num_replays(driver)[False] == 1


@in_the_interpreter
def test_a_single_token_of_a_prompt_is_computed_where_requests_come_one_by_one(
    folder: Path, launches: Launches
) -> None:
    with interpreted_kernels():
        eager = Driver(folder, max_num_seqs=1)
    states = []
    for driver in (eager, captured(folder, max_num_seqs=1)):
        driver.add("a", make_prompt(4))
        for _ in range(3):
            driver.step({"a": 1})
        states.append(driver.cache.tensor[driver.sequences["a"].block_ids[0], :, -1])
    torch.testing.assert_close(*states, atol=0.02, rtol=0.02, equal_nan=True)
    assert num_replays(driver)[False] == 3


# All wait for what the steps before have sampled, or have their logits looked at.
LOOK_BACK = (
    SamplingParams(temperature=0.0, repetition_penalty=1.5),
    SamplingParams(temperature=0.8, frequency_penalty=0.5, logprobs=2),
    SamplingParams(temperature=0.0, prompt_logprobs=1),
)


@in_the_interpreter
def test_a_step_that_looks_back_replays_its_forward_pass(folder: Path, launches: Launches) -> None:
    """Others in its batch get what they would get without it, and so does it."""
    plain, replayed = Driver(folder), captured(folder)
    results: list[list[Any]] = []
    for driver in (plain, replayed):
        results.append([])
        for i, params in enumerate(PARAMS[:2]):
            driver.add(f"ahead {i}", make_prompt(5 + i), params=params, seed=i)
        for step in range(12):
            if step % 4 == 2:
                i = step // 4
                driver.add(f"back {i}", make_prompt(9), params=LOOK_BACK[i], seed=i)
            output = driver.step(dict.fromkeys(driver.sequences, 16))
            results[-1].append((output.logprobs, output.prompt_logprobs))
            if step % 4 == 3:
                driver.finish(f"back {step // 4}")
        results[-1].append({name: s.output for name, s in driver.sequences.items()})
    assert_close(results[1], results[0])
    assert sum(num_replays(replayed).values()) == 12


@in_the_interpreter
def test_only_steps_that_score_prompts_wait_for_their_hidden_states(
    folder: Path, launches: Launches
) -> None:
    plain, replayed = Driver(folder), captured(folder)
    results: list[list[Any]] = []
    for driver in (plain, replayed):
        request = driver.add("a", make_prompt(9), params=LOOK_BACK[2])
        results.append([])
        for _ in range(6):
            output = driver.step({"a": 5})
            results[-1].append((output.logprobs, output.prompt_logprobs))
        results[-1].append({"a": request.output})
    assert_close(results[1], results[0])
    assert [bool(prompt) for _, prompt in results[1][:-1]] == [True, True] + [False] * 4
    assert num_draws(replayed) == 4


def assert_close(got: list[Any], want: list[Any]) -> None:
    """The last entries are tokens, the others logprobs, which may differ in their last bits."""
    assert got[-1] == want[-1]
    for pair in zip(got[:-1], want[:-1], strict=True):
        for new, old in zip(*pair, strict=True):
            assert new.keys() == old.keys()
            for name, lists in new.items():
                assert _chosen(lists.logprob_token_ids) == _chosen(old[name].logprob_token_ids)
                assert _chosen(lists.logprobs) == pytest.approx(
                    _chosen(old[name].logprobs), abs=0.05
                )


def _chosen(entries: tuple[tuple[Any, ...], ...]) -> list[Any]:
    """Of each position the first entry, which is that of the token that was sampled."""
    return [position[0] for position in entries]


@in_the_interpreter
def test_steps_with_drafts_replay_and_bring_the_tokens_without(
    folder: Path, adapters: list[Path], launches: Launches
) -> None:
    """Drafts that are right, right at first, wrong, or none, beside a prompt's chunks."""
    rng = random.Random(0)
    params = [*PARAMS, PARAMS[0]]
    plain, drafted = Driver(folder, adapters=adapters), captured(folder, adapters=adapters)
    for driver in (plain, drafted):
        for i, each in enumerate(params):
            adapter = adapters[0] if i == 3 else None
            driver.add(str(i), make_prompt(5 + i), params=each, seed=i, adapter=adapter)
    plain.run(*plain.sequences, num_tokens=14)
    wanted = {name: s.output for name, s in plain.sequences.items()}
    num_right = num_drafts = 0
    while short := {name for name, s in drafted.sequences.items() if len(s.output) < 10}:
        drafts = {}
        for name in short:
            known = len(drafted.sequences[name].output)
            count = rng.randrange(4)
            if known and count:
                right = wanted[name][known : known + rng.randrange(count + 1)]
                drafts[name] = (*right, *(7 for _ in range(count - len(right))))
        output = drafted.step(dict.fromkeys(short, 16), drafts)
        sampled = dict(zip(output.request_ids, output.sampled_token_ids, strict=True))
        num_drafts += sum(map(len, drafts.values()))
        num_right += sum(len(sampled[name]) - 1 for name in drafts)
    assert 0 < num_right < num_drafts
    assert {name: s.output[:10] for name, s in drafted.sequences.items()} == {
        name: output[:10] for name, output in wanted.items()
    }
    assert num_replays(drafted)[True] > 1
