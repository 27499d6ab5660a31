"""A cluster under load, watched by Prometheus."""

import contextlib
import random
import string
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import openai
from monitoring import ALERTS
from prometheus import Prometheus, Target

from support.cluster import HTTP_PORT, METRICS_PORT, Cluster

# As the chart's autoscaling queries of tests/helm have them.
NAMESPACE, RELEASE = "serving", "demo"
REQUEST_TIMEOUT_S = 60.0
RETRY_S = 0.2
SCRAPE_TIMEOUT_S = 60.0
POLL_S = 0.25


class Load:
    """Clients of the OpenAI API that each send one request after the other; a context manager."""

    def __init__(
        self,
        base_url: str,
        *,
        clients: int,
        prompt_tokens: tuple[int, int] = (1, 300),
        max_tokens: int = 24,
        pause_s: float = 0.0,
        fields: Callable[[], Mapping[str, object]] = dict,
    ) -> None:
        """`fields` returns what a request has besides."""
        self._client = openai.OpenAI(
            base_url=base_url, api_key="none", max_retries=0, timeout=REQUEST_TIMEOUT_S
        )
        self._prompt_tokens = prompt_tokens
        self._max_tokens = max_tokens
        self._pause_s = pause_s
        self._fields = fields
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._send) for _ in range(clients)]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(timeout=REQUEST_TIMEOUT_S)
        self._client.close()

    def _send(self) -> None:
        with contextlib.suppress(openai.APIConnectionError):
            model = self._client.models.list().data[0].id
        while not self._is_over.wait(self._pause_s):
            # A character is a token. The answers are not looked at: other tests do.
            prompt = "".join(
                random.choices(string.ascii_letters, k=random.randint(*self._prompt_tokens))
            )
            try:
                self._client.completions.create(
                    model=model,
                    prompt=prompt,
                    max_tokens=self._max_tokens,
                    extra_body={"ignore_eos": True, **self._fields()},
                )
            except openai.APIError:
                self._is_over.wait(RETRY_S)


@dataclass(frozen=True)
class World:
    cluster: Cluster
    prometheus: Prometheus

    def load(self, **options: object) -> Load:
        host = self.cluster.members["router-0"].host
        return Load(f"http://{host}:{HTTP_PORT}/v1", **options)  # type: ignore[arg-type]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Undo what faults are left at the end; print alerts and logs if it fails."""
        try:
            yield
        except BaseException:  # it goes on; the logs say why
            print(*self.prometheus.query("ALERTS"), self.cluster.log_tails(), sep="\n")
            raise
        finally:
            self.cluster.restore()

    def wait_until(self, is_so: Callable[[], bool], what: str, *, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not is_so():
            assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
            time.sleep(POLL_S)


@contextlib.contextmanager
def make_world(model: Path, folder: Path) -> Iterator[World]:
    """Start two workers of each role, a router, and Prometheus."""
    cluster = Cluster(
        model=model,
        log_dir=folder,
        flags={"num-blocks": 400, "kv-checksums": True, "kv-offload-host-bytes": 2**28},
        # With the second at which it looks next still sooner than it misses a decode worker that
        # has stopped (5 s).
        prefill_flags={"kv-session-timeout-s": 3.5},
        # So few that short requests can take all, and that long ones fill the KV blocks before.
        decode_flags={"max-num-seqs": 24},
        # No queue is so long but where a test wants that.
        router_flags={"redrive-wait-s": 1.0, "max-prefill-queue-tokens": 9000},
    )
    with cluster:
        targets = [
            Target(
                f"{member.host}:{METRICS_PORT}",
                {
                    "namespace": NAMESPACE,
                    "release": RELEASE,
                    "pod": name,
                    "component": name.split("-")[0],
                },
            )
            for name, member in cluster.members.items()
        ]
        with Prometheus(folder, targets, ALERTS) as prometheus:
            world = World(cluster, prometheus)
            # An increase needs a sample from before.
            world.wait_until(
                lambda: len(prometheus.query("up == 1")) == len(targets),
                "all processes are scraped",
                timeout_s=SCRAPE_TIMEOUT_S,
            )
            yield world
