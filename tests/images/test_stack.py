"""compose.yaml's stack: it generates, and is replaced and broken under load.

Each test goes on with what the last one left.
"""

import json
import re
import urllib.request
from collections.abc import Iterator

import pytest
from containers import Docker, Stack, running_stack, wait_for
from under_load import PROMPTS, Ask, Load, openai_client, pdserve_client

pytestmark = pytest.mark.images

WORKERS = ("prefill", "decode")
REDRIVES = "pdserve_redrives_total"


@pytest.fixture(scope="module")
def ask(stack: Stack) -> Iterator[Ask]:
    """OpenAI's SDK, at the first router."""
    (router,) = stack.containers("router")
    with openai_client(stack.published(router, 8000)) as client:
        yield client


@pytest.fixture(scope="module")
def expected(stack: Stack, ask: Ask) -> dict[str, str]:
    """The answers when nothing happens."""
    (router,) = stack.containers("router")
    stack.wait_for_workers(router, prefill=1, decode=1)
    answers = [ask(prompt) for prompt in PROMPTS]
    assert not any(answer.error for answer in answers), answers
    return {answer.prompt: answer.text for answer in answers}


def transport(stack: Stack) -> str:
    """Return how KV travels, by the word of the only decode service, and print it."""
    (decode,) = stack.containers("decode")
    (connected,) = set(re.findall(r"connected to .* by (\w+)", stack.docker("logs", decode)))
    print(f"KV travels by {connected}")
    return str(connected)


def test_generates_over_both_services(stack: Stack, expected: dict[str, str]) -> None:
    (router,) = stack.containers("router")
    routed = stack.metrics(router)
    assert routed['pdserve_requests_routed_total{path="disaggregated",reason=""}'] == len(PROMPTS)
    assert all(len(text) > 100 for text in expected.values())
    assert transport(stack) == "tcp"


def test_prometheus_scrapes_everything_with_the_labels_of_the_chart(stack: Stack) -> None:
    (prometheus,) = stack.containers("prometheus")
    address = stack.published(prometheus, 9090)

    def ask(path: str) -> list[dict[str, dict[str, str]]]:
        with urllib.request.urlopen(f"http://{address}/api/v1/{path}", timeout=5) as response:
            found = json.load(response)["data"]
        return list(found.get("result", found.get("groups")))

    def components() -> list[str]:
        up = ask('query?query=up{namespace="compose",release="pdserve",pod!=""}==1')
        return sorted(series["metric"]["component"] for series in up)

    wait_for(lambda: components() == ["decode", "prefill", "router"], 60.0)
    assert ask("rules")


def test_workers_are_replaced_under_load(stack: Stack, ask: Ask, expected: dict[str, str]) -> None:
    """One more before one less; the old one drains."""
    (router,) = stack.containers("router")
    with Load(ask, expected) as load:
        for service in WORKERS:
            _, old = stack.scale(service, 2)
            both = {name: 2 if name == service else 1 for name in WORKERS}
            stack.wait_for_workers(router, **both)
            assert stack.remove(old) == 0
            load.wait_for_answers()
    assert not load.failed()


def test_routers_are_replaced_under_load(stack: Stack, expected: dict[str, str]) -> None:
    (old,) = stack.containers("router")
    new, _ = stack.scale("router", 2)
    addresses = [stack.published(router, 50051) for router in (old, new)]
    with pdserve_client(addresses) as ask, Load(ask, expected) as load:
        assert stack.remove(old) == 0
        load.wait_for_answers()
    assert not load.failed()


@pytest.mark.parametrize("service", WORKERS)
def test_a_killed_worker_comes_back(stack: Stack, expected: dict[str, str], service: str) -> None:
    (router,) = stack.containers("router")
    for name in WORKERS:
        stack.scale(name, 2)
    stack.wait_for_workers(router, prefill=2, decode=2)
    victim = stack.containers(service)[0]
    with openai_client(stack.published(router, 8000)) as ask, Load(ask, expected) as load:
        before = stack.total(router, REDRIVES)
        stack.kill(victim)
        wait_for(lambda: stack.num_restarts(victim) == 1, 30.0)
        load.wait_for_answers()
        stack.wait_until_healthy(victim)
        stack.wait_for_workers(router, prefill=2, decode=2)
    # A prompt is over so soon that the kill may hit none.
    assert service == "prefill" or stack.total(router, REDRIVES) > before
    assert not load.wrong()
    assert not load.failed()


def test_a_worker_that_is_cut_off_comes_back(stack: Stack, expected: dict[str, str]) -> None:
    (router,) = stack.containers("router")
    victim = stack.containers("decode")[0]
    with openai_client(stack.published(router, 8000)) as ask, Load(ask, expected) as load:
        before = stack.total(router, REDRIVES)
        stack.docker("network", "disconnect", stack.network, victim)
        stack.wait_for_workers(router, prefill=2, decode=1)
        load.wait_for_answers()
        assert stack.total(router, REDRIVES) > before
        stack.docker("network", "connect", "--alias=decode", stack.network, victim)
        stack.wait_for_workers(router, prefill=2, decode=2)
    assert not load.wrong()
    assert not load.failed()


def test_kv_travels_through_shared_memory_where_it_is_allowed_to(docker: Docker) -> None:
    files = "compose.yaml:deploy/compose.shm.yaml"
    with running_stack(docker, ["router"], {"COMPOSE_FILE": files}) as stack:
        (router,) = stack.containers("router")
        stack.wait_for_workers(router, prefill=1, decode=1)
        assert transport(stack) == "shm"
        with openai_client(stack.published(router, 8000)) as ask:
            assert not ask(PROMPTS[0]).error
        samples = stack.metrics(router)
        assert samples['pdserve_requests_routed_total{path="disaggregated",reason=""}'] == 1


def test_compose_takes_all_files(stack: Stack) -> None:
    for override in ("shm", "cuda"):
        files = ("--file=compose.yaml", f"--file=deploy/compose.{override}.yaml")
        stack.compose(*files, "--profile=monitoring", "config", "--quiet")
