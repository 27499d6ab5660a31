"""Requests for vectors, by what they are asked for."""

from typing import get_args

from prometheus_client import CollectorRegistry, Counter

from pdserve_common.types.engine import FinishReason
from pdserve_common.types.pooling_params import PoolingTask


class PoolingMetrics:
    """Of a router, beside what it counts of requests of all kinds."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "pdserve_pooling_requests_total",
            "Pooling requests, one for each input, by task (embed, classify, score) and end",
            ["task", "outcome"],
            registry=registry,
        )
        self._prompt_tokens = Counter(
            "pdserve_pooling_prompt_tokens_total",
            "Prompt tokens of accepted pooling requests by task",
            ["task"],
            registry=registry,
        )
        for task in get_args(PoolingTask):
            self._prompt_tokens.labels(task=task)
            for reason in FinishReason:
                self._requests.labels(task=task, outcome=str(reason))

    def on_taken(self, task: str, num_prompt_tokens: int) -> None:
        """A worker is about to get a request."""
        self._prompt_tokens.labels(task=task).inc(num_prompt_tokens)

    def on_end(self, task: str, outcome: str) -> None:
        """A request has ended."""
        self._requests.labels(task=task, outcome=outcome).inc()
