"""The waterfall where steps take so long that 2% of them are more than a message's way."""

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from checks import TWO_TOKENS, Asker, wait_until_handing_off
from cluster import Cluster
from ground import PROMPT

from pdserve.v1 import inference_service_pb2 as pb2
from pdserve_client.client import Client

pytestmark = pytest.mark.slow

STEP_S = 0.2
# On a busy machine any single message may be late: so many are asked until one is not.
MAX_REQUESTS = 12
# What may lie between the router's clock and the client's, and what no stage may explain.
TOLERANCE = 0.02
# A time, and what of it no stage explains.
PARTS = [("ttft_ns", "return_ns"), ("first_itl_ns", "decode_return_ns")]


class Measured(NamedTuple):
    """One request: the client's clock (ns) and what the router says."""

    ttft_ns: int
    first_itl_ns: int
    metrics: pb2.RequestMetrics


@pytest.fixture(scope="module")
def measured(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Measured]]:
    logs = tmp_path_factory.mktemp("logs")
    with Cluster(model=model, log_dir=logs, prefill=1, decode=1) as cluster:
        with Asker(cluster.addresses) as asker:
            wait_until_handing_off(cluster, asker)
        for name in cluster.workers:
            cluster.controls(name).slow_down(STEP_S)
        client = Client(cluster.addresses)
        measured = [ask(client, 0)]
        while not all(is_explained(measured, *each) for each in PARTS) and (
            len(measured) < MAX_REQUESTS
        ):
            measured.append(ask(client, len(measured)))
        yield measured
        client.close()


def ask(client: Client, number: int) -> Measured:
    started = time.monotonic_ns()
    times = []
    metrics = pb2.RequestMetrics()
    for output in client.generate(PROMPT, TWO_TOKENS, timeout_s=30, cache_salt=str(number)):
        times += [time.monotonic_ns()] * len(output.outputs[0].token_ids)
        if output.finished:
            metrics = output.metrics
    first, second = times
    return Measured(first - started, second - first, metrics)


@pytest.mark.parametrize(("whole", "rest"), PARTS)
def test_stages_explain_98_percent_of_what_the_client_waits(
    measured: list[Measured], whole: str, rest: str
) -> None:
    for each in measured:
        assert each.metrics.path == "disaggregated"
    assert statistics.median(getattr(each, whole) for each in measured) > STEP_S * 1e9
    assert is_explained(measured, whole, rest), measured


def is_explained(measured: list[Measured], whole: str, rest: str) -> bool:
    """Do the clocks agree for one request, and do stages leave little of one?"""
    wait = statistics.median(getattr(each, whole) for each in measured)
    apart = min(abs(getattr(each, whole) - getattr(each.metrics, whole)) for each in measured)
    return max(apart, min(getattr(each.metrics, rest) for each in measured)) <= TOLERANCE * wait
