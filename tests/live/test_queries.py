"""Every query that the chart brings returns numbers from the running system."""

import itertools
import math
import random
import string
import time
from collections.abc import Iterator
from functools import partial

from monitoring import Query, autoscaling_queries, panel_queries, rules
from world import NAMESPACE, RELEASE, World

from pdserve_router.requests.input.request_limits import INLINE_BYTES

ANSWER_TIMEOUT_S = 90.0
VICTIM = "decode-1"


def queries(world: World) -> list[Query]:
    recorded = [Query(rule["record"], rule["record"]) for rule in rules() if "record" in rule]
    panels = panel_queries(
        namespace=NAMESPACE, release=RELEASE, model=find_model(world), __rate_interval="15s"
    )
    return [*panels, *recorded, *autoscaling_queries()]


def find_model(world: World) -> str:
    """Ask for it as the dashboards do: router and workers have to call it the same."""
    of_release = f'{{namespace="{NAMESPACE}", release="{RELEASE}"}}'
    ((labels, _),) = world.prometheus.query(f"group by (model) (pdserve_build_info{of_release})")
    return labels["model"]


def new_grammar() -> dict[str, object]:
    """Return one that has to be compiled."""
    return {"ignore_eos": False, "structured_outputs": {"choice": [letters(20)]}}


def begun_on_decode() -> Iterator[dict[str, object]]:
    """Of two requests the first has its prompt cached on a decode worker alone, as one token needs
    no P; P reads the start of the second one's from there.
    """
    while True:
        start = letters(100)
        yield {"prompt": start, "max_tokens": 1}
        yield {"prompt": start + letters(100)}


def returning() -> Iterator[dict[str, object]]:
    """Prompts that come back when the pool has forgotten them, and a tier has not."""
    yield from itertools.cycle([{"prompt": letters(900), "max_tokens": 1} for _ in range(16)])


def letters(count: int) -> str:
    return "".join(random.choices(string.ascii_lowercase, k=count))


def test_all_queries_have_data(world: World) -> None:
    """Under load. Only what counts lost workers, lost transfers and alerts needs a fault."""
    empty = queries(world)
    large = world.load(clients=1, pause_s=0.5, fields=lambda: {"user": "x" * INLINE_BYTES})
    constrained = world.load(clients=1, pause_s=0.5, fields=new_grammar)
    begun = world.load(clients=1, pause_s=0.5, fields=partial(next, begun_on_decode()))
    back = world.load(clients=1, pause_s=0.1, fields=partial(next, returning()))
    with world.restored(), world.load(clients=8, max_tokens=48), large, constrained, begun, back:
        time.sleep(3)
        world.cluster.controls("decode-0").inject("remote_disconnect", count=4)
        world.cluster.kill(VICTIM)
        is_back = False
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while empty := [query for query in empty if not world.prometheus.has_data(query.expr)]:
            assert time.monotonic() < deadline, "\n".join(map(str, empty))
            firing = f'ALERTS{{alertstate="firing", pod="{VICTIM}"}}'
            if not is_back and world.prometheus.has_data(firing):
                world.cluster.restart(VICTIM)
                is_back = True
            time.sleep(1)


def test_series_have_the_labels_that_the_chart_sets(world: World) -> None:
    """Nothing that the processes export hides a label of the target."""
    for metric in ("pdserve_workers", "pdserve_kv_blocks", "pdserve_request_stage_seconds_count"):
        for labels, value in world.prometheus.query(metric):
            assert math.isfinite(value)
            assert labels["release"] == RELEASE
            assert not [name for name in labels if name.startswith("exported_")]
