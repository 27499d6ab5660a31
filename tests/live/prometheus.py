"""A real Prometheus and Alertmanager as processes, and a webhook that alerts are sent to."""

import contextlib
import json
import math
import random
import re
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterable, Mapping
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import yaml

READY_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 30.0
POLL_S = 0.2
# A minute of the rules becomes a second: the same rules over the same queries, 60 times sooner.
# Prometheus scrapes and evaluates each second here, each 15 s or more where the chart is installed.
SECONDS = {"s": 1 / 60, "m": 1, "h": 60, "d": 24 * 60}


class Target(NamedTuple):
    """A process to scrape."""

    address: str
    labels: Mapping[str, str]


class Webhook:
    """Where Alertmanager sends alerts: keeps those that fire."""

    def __init__(self) -> None:
        self._alerts: list[dict[str, Any]] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}/"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def find(self, labels: Mapping[str, str], *, since: float) -> dict[str, Any] | None:
        """Return the newest alert with these labels that began to fire after `since` (Unix time).

        When it came says less: an alert comes again with each other one of its group.
        """
        for alert in reversed(self._alerts):
            began = datetime.fromisoformat(alert["startsAt"]).timestamp()
            if began >= since and labels.items() <= alert["labels"].items():
                return alert
        return None

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        alerts = self._alerts

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                alerts.extend(a for a in body["alerts"] if a["status"] == "firing")
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        return Handler


class Prometheus:
    """Scrapes `targets` each second and evaluates the scaled rules; use as a context manager."""

    def __init__(self, folder: Path, targets: Iterable[Target], rules: Path) -> None:
        self._folder = folder
        self._port, self._alertmanager_port = free_port(), free_port()
        self.webhook = Webhook()
        _write(folder / "rules.yaml", scaled(yaml.safe_load(rules.read_text())))
        _write(folder / "prometheus.yaml", self._config(targets))
        _write(folder / "alertmanager.yaml", self._alertmanager_config())
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "Prometheus":
        self._start(
            "prometheus-alertmanager",
            f"--config.file={self._folder}/alertmanager.yaml",
            f"--storage.path={self._folder}/alertmanager",
            f"--web.listen-address=127.0.0.1:{self._alertmanager_port}",
            "--cluster.listen-address=",
        )
        self._start(
            "prometheus",
            f"--config.file={self._folder}/prometheus.yaml",
            f"--storage.tsdb.path={self._folder}/data",
            f"--web.listen-address=127.0.0.1:{self._port}",
        )
        for port in (self._alertmanager_port, self._port):
            self._wait_ready(f"http://127.0.0.1:{port}/-/ready")
        return self

    def __exit__(self, *exc_info: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait(timeout=10)
        self.webhook.close()

    def query(self, expr: str) -> list[tuple[dict[str, str], float]]:
        """Return the samples of an instant query. Raises urllib.error.HTTPError if it is wrong."""
        parameters = urllib.parse.urlencode({"query": expr})
        url = f"http://127.0.0.1:{self._port}/api/v1/query?{parameters}"
        with urllib.request.urlopen(url, timeout=ANSWER_TIMEOUT_S) as response:
            result = json.load(response)["data"]["result"]
        return [(each["metric"], float(each["value"][1])) for each in result]

    def has_data(self, expr: str) -> bool:
        """Whether a query returns a number."""
        return any(math.isfinite(value) for _, value in self.query(expr))

    def _start(self, command: str, *flags: str) -> None:
        with (self._folder / f"{command}.log").open("wb") as log:
            self._processes.append(
                subprocess.Popen([command, *flags], stdout=log, stderr=subprocess.STDOUT)
            )

    def _wait_ready(self, url: str) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=1):
                return
            assert time.monotonic() < deadline, f"{url} is not ready"
            time.sleep(POLL_S)

    def _config(self, targets: Iterable[Target]) -> dict[str, Any]:
        return {
            "global": {
                "scrape_interval": "1s",
                "scrape_timeout": "1s",
                "evaluation_interval": "1s",
            },
            "rule_files": [str(self._folder / "rules.yaml")],
            "alerting": {
                "alertmanagers": [
                    {"static_configs": [{"targets": [f"127.0.0.1:{self._alertmanager_port}"]}]}
                ]
            },
            "scrape_configs": [
                {
                    "job_name": "pdserve",
                    "static_configs": [
                        {"targets": [target.address], "labels": dict(target.labels)}
                        for target in targets
                    ],
                }
            ],
        }

    def _alertmanager_config(self) -> dict[str, Any]:
        return {
            "route": {
                "receiver": "webhook",
                "group_by": ["..."],
                "group_wait": "0s",
                "group_interval": "1s",
                # One that is lost, or taken for the one before, comes again.
                "repeat_interval": "5s",
            },
            "receivers": [
                {"name": "webhook", "webhook_configs": [{"url": self.webhook.url}]},
            ],
        }


def scaled(rules: dict[str, Any]) -> dict[str, Any]:
    """Return the rules with every duration, in `for` and in ranges, a sixtieth; nothing else."""
    return {
        "groups": [
            {**group, "rules": [_scaled_rule(rule) for rule in group["rules"]]}
            for group in rules["groups"]
        ]
    }


def _scaled_rule(rule: dict[str, Any]) -> dict[str, Any]:
    changed = {"expr": re.sub(r"\[(\w+)\]", lambda m: f"[{_sixtieth(m[1])}]", rule["expr"])}
    if "for" in rule:
        changed["for"] = _sixtieth(rule["for"])
    return rule | changed


def _sixtieth(duration: str) -> str:
    number, unit = int(duration[:-1]), duration[-1]
    return f"{round(number * SECONDS[unit] * 1000)}ms"


def free_port() -> int:
    """Return a port below those that outgoing connections take, so that none takes it meanwhile."""
    while True:
        port = random.randrange(20000, 32000)
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(yaml.safe_dump(content))
