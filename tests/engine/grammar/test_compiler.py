"""The compiler of grammars, with its process: what it makes, keeps and refuses, and its death."""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from pdserve_common.errors import (
    EngineDeadError,
    InvalidRequestError,
    OverloadedError,
    RequestFailedError,
)
from pdserve_common.structured import StructuralTag, to_structural_tag
from pdserve_common.types.sampling_params import StructuredOutputsParams
from pdserve_engine.grammar import compile_queue as compiler_module
from pdserve_engine.grammar import compiler_client as process_module
from pdserve_engine.grammar import compiler_process as child_module
from pdserve_engine.grammar.cache import GrammarCache
from pdserve_engine.grammar.compile_queue import MAX_TEXT_BYTES, GrammarCompiler, Outcome
from pdserve_engine.grammar.compiler_client import CompilerProcess
from pdserve_engine.grammar.messages import Refused
from pdserve_engine.grammar.native import (
    CompiledGrammar,
    Matcher,
    TokenizerInfo,
    compile_structural_tag,
)
from support import hostile_grammars
from support.grammars import EOS, structural_tag, with_digest
from support.work import work_of

NUMBER = structural_tag({"type": "regex", "pattern": "[0-9]+"})
WORD = structural_tag({"type": "regex", "pattern": "[a-z]+"})
# Takes quadratic time: minutes.
PROPERTIES = {f"key {i}": {"type": "number"} for i in range(20_000)}
ENDLESS = structural_tag(
    {"type": "json_schema", "json_schema": {"type": "object", "properties": PROPERTIES}}
)
# Some hundred KB in memory, a few MB as text.
LARGE = [
    structural_tag(
        {
            "type": "json_schema",
            "json_schema": {
                "type": "object",
                "properties": {f"key {each} {i}": {"type": "number"} for i in range(120)},
            },
        }
    )
    for each in "ab"
]
TIMEOUT_S = 60.0
# 11 s where the lowest priority gets its share of a core.
ANSWER_S = 60.0
# What a process may grow while it compiles for strangers: it keeps the memory of the largest.
SLACK_BYTES = 64 * 1024 * 1024


class Compiler:
    """A compiler, and what it says."""

    def __init__(self, tokenizer_info: TokenizerInfo, **settings: Any) -> None:
        self.outcomes: list[Outcome] = []
        self.compiler = GrammarCompiler(
            tokenizer_info, observe=lambda outcome, _: self.outcomes.append(outcome), **settings
        )
        self.submit = self.compiler.submit
        self._others = set(processes())

    def error(self, tag: StructuralTag) -> BaseException | None:
        return self.submit(tag).exception(TIMEOUT_S)

    def processes(self) -> list[psutil.Process]:
        return [process for process in processes() if process not in self._others]

    def await_fork(self) -> psutil.Process:
        """Return the process that compiles now."""
        return await_result(lambda: [f for p in self.processes() for f in children(p)])[0]

    def kill_twice(self) -> None:
        """Kill what is compiled now, which is tried again, and again."""
        for _ in range(2):
            fork = self.await_fork()
            fork.kill()
            await_end(fork)


def assert_given_up(error: BaseException | None) -> None:
    """Of what takes too much CPU time: a busy machine does not even give it that much."""
    if isinstance(error, OverloadedError):
        assert "after 10 s" in error.message
    else:
        assert isinstance(error, InvalidRequestError)
        assert "2 s of CPU time" in error.message


def processes() -> list[psutil.Process]:
    """Return all compilers' processes."""
    return [p for p in children(psutil.Process()) if "pdserve_engine.grammar" in p.cmdline()]


def children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return [c for c in process.children() if c.status() != psutil.STATUS_ZOMBIE]
    except psutil.NoSuchProcess:
        return []


def await_result(find: Callable[[], list[psutil.Process]]) -> list[psutil.Process]:
    deadline = time.monotonic() + TIMEOUT_S
    while not (found := find()):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return found


def await_end(*ended: psutil.Process) -> None:
    _, alive = psutil.wait_procs(ended, timeout=TIMEOUT_S)
    assert not alive


@pytest.fixture
def make_compiler(tokenizer_info: TokenizerInfo) -> Iterator[Callable[..., Compiler]]:
    made = []

    def make(**settings: Any) -> Compiler:
        made.append(Compiler(tokenizer_info, **settings))
        return made[-1]

    yield make
    for compiler in made:
        compiler.compiler.close()


def test_a_grammar_is_compiled_once_and_its_process_starts_with_it(make_compiler) -> None:
    compiler = make_compiler()
    assert not compiler.processes()
    first = compiler.submit(NUMBER).result(TIMEOUT_S)
    assert len(compiler.processes()) == 1
    assert compiler.submit(NUMBER).result(0) is first
    assert compiler.outcomes == ["compiled", "cached"]


def test_those_who_ask_for_one_grammar_wait_for_one_compilation(make_compiler) -> None:
    compiler = make_compiler()
    first, second = compiler.submit(NUMBER), compiler.submit(NUMBER)
    assert first is second
    assert isinstance(first.result(TIMEOUT_S), CompiledGrammar)
    assert compiler.outcomes == ["compiled"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (structural_tag({"type": "regex", "pattern": "["}).text, "Unclosed"),
        (structural_tag({"type": "grammar", "grammar": "root ::= nowhere"}).text, "nowhere"),
        ("{", "JSON"),
        ("x" * (MAX_TEXT_BYTES + 1), f"at most {MAX_TEXT_BYTES}"),
    ],
    ids=["regex", "grammar", "text", "size"],
)
def test_what_is_no_grammar_is_refused(make_compiler, text: str, reason: str) -> None:
    compiler = make_compiler()
    error = compiler.error(with_digest(text))
    assert isinstance(error, InvalidRequestError)
    assert reason in error.message
    assert error.field == "structured_outputs"
    assert compiler.outcomes == ["refused"]


def test_a_constraint_is_read_once_whatever_its_spelling(make_compiler) -> None:
    compiler = make_compiler()
    spellings = [
        StructuredOutputsParams(json_schema=text)
        for text in ('{"type": "integer", "minimum": 3}', '{"minimum":3, "type":"integer"}')
    ]
    for _ in range(2):
        grammars = [compiler.compiler.compile(each).result(TIMEOUT_S) for each in spellings]
        assert grammars[0] is grammars[1]
    assert compiler.outcomes == ["compiled", "cached", "cached", "cached"]
    assert compiler.compiler.compile(spellings[1]).done()


def test_a_constraint_and_its_tag_are_compiled_once(make_compiler) -> None:
    """As for who asks for a constraint while it is compiled, once it was read."""
    compiler = make_compiler()
    params = StructuredOutputsParams(regex="[a-f]+")
    tag = to_structural_tag(params)
    futures = [compiler.compiler.compile(params), compiler.submit(tag)]
    first, second = (each.result(TIMEOUT_S) for each in futures)
    assert first is second
    assert compiler.outcomes == ["compiled", "cached"]


def test_what_is_not_enforced_is_refused_with_its_place(make_compiler) -> None:
    compiler = make_compiler()
    future = compiler.compiler.compile(StructuredOutputsParams(json_schema='{"not": {}}'))
    error = future.exception(TIMEOUT_S)
    assert isinstance(error, InvalidRequestError)
    assert error.message == "structured_outputs.json_schema: not at the root is not enforced"
    assert error.field == "structured_outputs"


@pytest.mark.parametrize(
    "constraint", [{"choice": ("a" * (1 << 20),)}, {"regex": "\ud800"}], ids=["large", "surrogate"]
)
def test_what_is_too_large_or_no_unicode_is_refused_at_once(
    make_compiler, monkeypatch, constraint
) -> None:
    monkeypatch.setattr(compiler_module, "digest_of", None)
    compiler = make_compiler()
    with pytest.raises(InvalidRequestError, match="has "):
        compiler.compiler.compile(StructuredOutputsParams(**constraint))
    assert not compiler.processes()


def test_a_constraint_that_takes_long_to_read_keeps_nobody_waiting(make_compiler) -> None:
    """A tag of a thousand schemas with patterns, which have limits each."""
    schema = {"type": "string", "pattern": "[a-f]{2,40}x[0-9]{1,30}"}
    formats = [{"type": "json_schema", "json_schema": schema}] * 1000
    text = json.dumps({"format": {"type": "sequence", "elements": formats}})
    params = StructuredOutputsParams(structural_tag=text)
    compiler = make_compiler()
    asked = work_of(lambda: compiler.compiler.compile(params)).num_calls
    assert 100 * asked < work_of(lambda: to_structural_tag(params)).num_calls


@pytest.fixture
def priorities(monkeypatch) -> list[int]:
    """Of the threads of this process that compile, in turn."""
    seen: list[int] = []

    def compile_here(text: str, tokenizer_info: TokenizerInfo) -> CompiledGrammar:
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return compile_structural_tag(text, tokenizer_info)

    monkeypatch.setattr(compiler_module, "compile_structural_tag", compile_here)
    return seen


def test_large_ones_are_compiled_again_at_the_lowest_priority(make_compiler, priorities) -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    compiler = make_compiler()
    grammar = compiler.submit(LARGE[0]).result(TIMEOUT_S)
    assert not Matcher(grammar).accept(EOS)
    assert priorities == [child_module.LOWEST_PRIORITY]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
    assert compiler.submit(LARGE[0]).result(0) is grammar
    number = compiler.submit(NUMBER).result(TIMEOUT_S)
    assert len(priorities) == 1
    # What a mask takes is known from either.
    assert min(grammar.first_mask_s, number.first_mask_s) > 0


def test_what_the_process_refuses_is_not_compiled_again(make_compiler, priorities) -> None:
    compiler = make_compiler()
    assert_given_up(compiler.error(ENDLESS))
    broken = LARGE[0].text.replace('"number"', '"numbers"', 1)
    assert isinstance(compiler.error(with_digest(broken)), InvalidRequestError)
    assert not priorities


def test_what_takes_too_much_memory_compiled_is_refused(tokenizer_info, monkeypatch) -> None:
    monkeypatch.setattr(child_module, "MAX_GRAMMAR_BYTES", child_module.MAX_SMALL_BYTES)
    answer = child_module._compile(LARGE[0].text, tokenizer_info)
    assert isinstance(answer, Refused)
    assert f"at most {child_module.MAX_SMALL_BYTES} fit" in answer.reason


def test_large_ones_are_refused_where_another_process_has_to_have_them(
    make_compiler, priorities
) -> None:
    compiler = make_compiler(serves_large=False)
    error = compiler.error(LARGE[0])
    assert isinstance(error, InvalidRequestError)
    assert "a worker of several ranks" in error.message
    assert not priorities
    compiler.submit(NUMBER).result(TIMEOUT_S)


def test_large_ones_take_turns_in_the_cache(make_compiler, tokenizer_info) -> None:
    size = compile_structural_tag(LARGE[0].text, tokenizer_info).num_bytes
    assert size > child_module.MAX_SMALL_BYTES
    compiler = make_compiler(cache_bytes=size * 3 // 2)
    for tag in (*LARGE, LARGE[0]):
        compiler.submit(tag).result(TIMEOUT_S)
    assert compiler.outcomes == ["compiled"] * 3


def test_a_full_queue_refuses_and_what_waits_is_compiled(make_compiler) -> None:
    compiler = make_compiler(max_queued=2)
    waiting = [compiler.submit(ENDLESS), compiler.submit(WORD)]
    error = compiler.error(NUMBER)
    assert isinstance(error, OverloadedError)
    assert error.retry_after_ms
    compiler.kill_twice()
    assert isinstance(waiting[0].exception(TIMEOUT_S), RequestFailedError)
    assert isinstance(waiting[1].result(TIMEOUT_S), CompiledGrammar)
    assert compiler.outcomes == ["overloaded", "failed", "compiled"]


def endless(number: int) -> StructuralTag:
    return with_digest(ENDLESS.text.replace("key 0", f"key {number} of mine"))


def test_clients_take_turns(make_compiler: Callable[..., Compiler]) -> None:
    """Also for what another one waits for further behind."""
    compiler = make_compiler()
    costly = [compiler.submit(endless(number), "mallory") for number in range(4)]
    shared = [compiler.submit(NUMBER, client) for client in ("mallory", "alice")]
    assert shared[0] is shared[1]
    small = compiler.submit(WORD, "alice")
    compiler.kill_twice()
    assert isinstance(small.result(TIMEOUT_S), CompiledGrammar)
    assert [future.done() for future in (*shared, *costly)] == [True] * 2 + [True] + [False] * 3


def test_of_a_full_queue_the_one_with_most_is_refused(
    make_compiler: Callable[..., Compiler],
) -> None:
    compiler = make_compiler(max_queued=4)
    costly = [compiler.submit(endless(number), "mallory") for number in range(4)]
    small = compiler.submit(WORD, "alice")
    assert isinstance(costly[3].exception(TIMEOUT_S), OverloadedError)
    assert isinstance(compiler.submit(endless(4), "mallory").exception(0), OverloadedError)
    compiler.kill_twice()
    assert isinstance(small.result(TIMEOUT_S), CompiledGrammar)


def test_two_that_ask_for_the_same_do_not_keep_others_out(
    make_compiler: Callable[..., Compiler],
) -> None:
    compiler = make_compiler(max_queued=4)
    costly = [
        [compiler.submit(endless(number), client) for client in ("mallory", "trudy")]
        for number in range(4)
    ]
    small = compiler.submit(WORD, "alice")
    assert [isinstance(each.exception(TIMEOUT_S), OverloadedError) for each in costly[3]] == [1, 1]
    compiler.kill_twice()
    assert isinstance(small.result(TIMEOUT_S), CompiledGrammar)


def test_what_was_served_in_a_turn_of_another_one_counts_no_more(
    make_compiler: Callable[..., Compiler],
) -> None:
    """Mallory asked for most, of which trudy's turns have served all but one."""
    now = 0.0
    compiler = make_compiler(max_queued=8, clock=lambda: now)
    compiler.submit(endless(0), "mallory")
    tags = [NUMBER, WORD, structural_tag({"type": "regex", "pattern": "[a-f]+"})]
    shared = [compiler.submit(tag, client) for tag in tags for client in ("mallory", "trudy")]
    own = compiler.submit(endless(1), "mallory")
    others = [compiler.submit(endless(number), "trudy") for number in (2, 3, 4)]
    compiler.await_fork()
    now = 10.0
    compiler.kill_twice()
    for each in shared:
        each.result(TIMEOUT_S)
    compiler.await_fork()
    for number in range(5, 10):
        compiler.submit(endless(number), f"client {number}")
    assert [future.done() for future in (own, *others)] == [False, False, False, True]
    assert isinstance(others[-1].exception(0), OverloadedError)


def test_others_do_not_wait_for_a_process_that_takes_its_time_to_die(
    make_compiler: Callable[..., Compiler], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = make_compiler()
    assert compiler.error(NUMBER) is None
    is_closing, may_close = threading.Event(), threading.Event()
    close = CompilerProcess.close

    def close_slowly(self: CompilerProcess) -> None:
        is_closing.set()
        assert may_close.wait(TIMEOUT_S)
        close(self)

    monkeypatch.setattr(CompilerProcess, "close", close_slowly)
    compiler.processes()[0].kill()
    word = compiler.submit(WORD)
    assert is_closing.wait(TIMEOUT_S)
    asker = threading.Thread(target=lambda: asked.append(compiler.submit(NUMBER)), daemon=True)
    asked: list[object] = []
    asker.start()
    asker.join(TIMEOUT_S)
    assert asked
    may_close.set()
    assert isinstance(word.result(TIMEOUT_S), CompiledGrammar)


def test_one_that_waited_too_long_is_refused(make_compiler, monkeypatch) -> None:
    monkeypatch.setattr(compiler_module, "MAX_QUEUED_S", 0.5)
    compiler = make_compiler()
    compiler.submit(ENDLESS)
    future = compiler.submit(WORD)
    time.sleep(1.0)
    compiler.kill_twice()
    assert isinstance(future.exception(TIMEOUT_S), OverloadedError)


def test_a_compilation_that_is_killed_is_tried_once_more(make_compiler) -> None:
    compiler = make_compiler()
    future = compiler.submit(ENDLESS)
    compiler.await_fork().kill()
    assert_given_up(future.exception(TIMEOUT_S))


def test_one_that_is_killed_twice_is_a_typed_error(make_compiler) -> None:
    compiler = make_compiler()
    future = compiler.submit(ENDLESS)
    compiler.kill_twice()
    assert isinstance(future.exception(TIMEOUT_S), RequestFailedError)
    assert compiler.outcomes == ["failed"]
    assert isinstance(compiler.submit(WORD).result(TIMEOUT_S), CompiledGrammar)


def test_a_compiler_that_is_killed_starts_anew(make_compiler) -> None:
    compiler = make_compiler()
    future = compiler.submit(ENDLESS)
    fork = compiler.await_fork()
    compiler.processes()[0].kill()
    await_end(fork)
    assert_given_up(future.exception(TIMEOUT_S))
    assert isinstance(compiler.submit(WORD).result(TIMEOUT_S), CompiledGrammar)


def test_a_compiler_that_hangs_is_killed(make_compiler, monkeypatch) -> None:
    compiler = make_compiler()
    compiler.submit(WORD).result(TIMEOUT_S)
    (stopped,) = compiler.processes()
    stopped.suspend()
    monkeypatch.setattr(process_module, "ANSWER_TIMEOUT_S", 0.2)
    # The second process is not stopped, but needs longer than that.
    assert isinstance(compiler.error(ENDLESS), RequestFailedError)
    await_end(stopped)
    assert compiler.processes() == []


def test_a_process_that_takes_its_time_to_die_costs_one_grammar(
    make_compiler: Callable[..., Compiler], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = make_compiler()
    assert compiler.error(NUMBER) is None
    (process,) = compiler.processes()

    def wait(self: object, timeout: float | None = None) -> int:
        raise subprocess.TimeoutExpired("compiler", timeout or 0.0)

    monkeypatch.setattr(subprocess.Popen, "wait", wait)
    process.kill()
    assert compiler.error(WORD) is None
    monkeypatch.undo()
    assert compiler.processes() != [process]


def test_the_end_leaves_no_process_and_nobody_waiting(make_compiler) -> None:
    compiler = make_compiler()
    futures = [compiler.submit(ENDLESS), compiler.submit(WORD)]
    fork = compiler.await_fork()
    ended = [fork, *compiler.processes()]
    compiler.compiler.close()
    assert all(isinstance(future.exception(0), EngineDeadError) for future in futures)
    assert isinstance(compiler.error(NUMBER), EngineDeadError)
    await_end(*ended)


def test_a_process_ends_with_the_thread_that_started_it(tokenizer_info: TokenizerInfo) -> None:
    started: list[CompilerProcess] = []

    def start() -> None:
        started.append(CompilerProcess())
        started[0].get_ready(tokenizer_info.serialize())

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    await_end(psutil.Process(started[0].pid))
    started[0].close()


def test_signals_to_the_group_do_not_end_it(make_compiler) -> None:
    compiler = make_compiler()
    compiler.submit(WORD).result(TIMEOUT_S)
    (process,) = compiler.processes()
    for signum in (signal.SIGINT, signal.SIGTERM):
        os.kill(process.pid, signum)
    assert isinstance(compiler.submit(NUMBER).result(TIMEOUT_S), CompiledGrammar)
    assert compiler.processes() == [process]


# ---- the cache


def test_a_cache_keeps_the_latest_used_that_fit() -> None:
    cache = GrammarCache(100)
    grammars = {name: CompiledGrammar(None, 40) for name in "abc"}
    cache.put("a", grammars["a"])
    cache.put("b", grammars["b"])
    assert cache.get("a") is grammars["a"]
    cache.put("c", grammars["c"])
    assert [name for name in "abc" if cache.get(name)] == ["a", "c"]
    assert cache.num_bytes == 80


def test_a_cache_counts_a_grammar_once_that_comes_again() -> None:
    cache = GrammarCache(100)
    for size in (40, 30, 30):
        cache.put("a", CompiledGrammar(None, size))
    assert cache.num_bytes == 30


def test_a_cache_keeps_nothing_that_is_larger_than_itself() -> None:
    cache = GrammarCache(100)
    cache.put("a", CompiledGrammar(None, 101))
    assert cache.get("a") is None
    assert cache.num_bytes == 0


# ---- strangers


@pytest.mark.parametrize(
    "count", [60, pytest.param(2000, marks=pytest.mark.soak)], ids=["some", "many"]
)
def test_whatever_strangers_send_is_compiled_or_refused(make_compiler, count: int) -> None:
    compiler = make_compiler()
    compiler.submit(WORD).result(TIMEOUT_S)
    (process,) = compiler.processes()
    num_bytes = process.memory_info().rss
    for number, text in enumerate(hostile_grammars.texts(count, count)):
        error = compiler.submit(with_digest(text)).exception(ANSWER_S)
        # Overloaded: a busy machine gives it too little time.
        assert error is None or isinstance(error, (InvalidRequestError, OverloadedError)), (
            number,
            text[:99],
        )
    assert compiler.processes() == [process]
    assert process.memory_info().rss < num_bytes + SLACK_BYTES
    assert set(compiler.outcomes) <= {"compiled", "refused", "overloaded", "cached"}
    assert min(map(compiler.outcomes.count, ("compiled", "refused"))) > count / 10
