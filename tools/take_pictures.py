"""Takes the pictures of the docs from a running system: `make pictures`.

Starts a stack with the bundled model and a Prometheus that watches it, loads it for some minutes,
and takes the chat page and the dashboards (`render_dashboards.py`) with headless Chromium.
"""

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from pdserve_client.config import StackConfig
from pdserve_client.stack import Stack
from render_dashboards import Source, page, panels_of

ROOT = Path(__file__).parent.parent
PICTURES = ROOT / "docs" / "images"
WIDTH = 900
WAIT_S = 60
# Above the README; of the dashboards, what tells most.
FRONT = {
    "pdserve-overview": [
        *("Requests", "Errors", "TTFT, p95", "Time per token, p95"),
        *("Ready prefill workers", "Ready decode workers"),
    ],
    "pdserve-waterfall": [
        "TTFT by stage, mean",
        "What requests wait for, mean",
        "First ITL by stage, mean",
        "Transfer that the prefill hides",
    ],
}
DASHBOARDS = ("overview", "waterfall", "kv-transfer", "router")
POOLS = ("prefill", "decode")
SLOTS = 16
NOTE = (
    "{:%d %B %Y}. {:.0f} minutes of one prefill and one decode worker with the bundled model on "
    "{} CPU cores: calm, then long prompts, then more long answers than decode has places for. "
    "Drawn from Prometheus' data, not by Grafana."
)


@dataclass(frozen=True)
class Load:
    """Requests that are sent from `at` on, in shares of the whole time."""

    at: float
    flags: str


LOADS = (
    Load(0.0, "--rate 3 --num-requests {calm} --input-len 128 --output-len 32"),
    Load(0.15, "--num-requests 400 --concurrency 24 --input-len 768 --output-len 8"),
    Load(0.55, "--num-requests 300 --concurrency 40 --input-len 64 --output-len 256"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=4.0, help="how long the load goes on")
    args = parser.parse_args()
    seconds = args.minutes * 60
    with (
        tempfile.TemporaryDirectory() as folder,
        running_stack(Path(folder)) as stack,
        prometheus(Path(folder), stack) as url,
        chromium() as browser,
    ):
        load(stack, seconds=seconds)
        source = Source(url=url, seconds=seconds, rate_interval="15s")
        take_dashboards(browser, source, Path(folder) / "page.html")
        take_chat_page(browser, f"http://127.0.0.1:{stack.http_port}/")


@contextmanager
def running_stack(folder: Path) -> Iterator[Stack]:
    ports = dict.fromkeys(("grpc_port", "http_port", "metrics_port", "worker_port"), 0)
    model = str(ROOT / "models" / "pdserve-tiny")
    stack = Stack(
        StackConfig(model=model, log_dir=str(folder / "logs"), max_num_seqs=SLOTS, **ports)
    )
    try:
        stack.start()
        for waiting in stack.wait_until_ready():
            print(f"\rwaiting for {', '.join(waiting) or 'nothing more'}\x1b[K", end="", flush=True)
        print()
        yield stack
    finally:
        stack.stop()


@contextmanager
def prometheus(folder: Path, stack: Stack) -> Iterator[str]:
    """Yield the URL of a Prometheus that scrapes the stack's processes each two seconds."""
    targets = [
        {
            "targets": [f"127.0.0.1:{process.metrics_port}"],
            "labels": {
                "namespace": "default",
                "release": "pdserve",
                "pod": process.name,
                "component": process.name.split("-")[0],
            },
        }
        for process in stack.processes
    ]
    config = {
        "global": {"scrape_interval": "2s", "scrape_timeout": "2s"},
        "rule_files": [str(ROOT / "helm" / "alerts" / "pdserve.yaml")],
        "scrape_configs": [{"job_name": "pdserve", "static_configs": targets}],
    }
    # JSON is YAML.
    (folder / "prometheus.yml").write_text(json.dumps(config))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'prometheus'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=error",
    ]
    process = subprocess.Popen(command)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(WAIT_S)


def load(stack: Stack, *, seconds: float) -> None:
    command = [sys.executable, "-m", "pdserve_client", "bench", "--address", stack.grpc_address]
    start = time.monotonic()
    running = []
    for seed, part in enumerate(LOADS):
        time.sleep(max(0.0, start + part.at * seconds - time.monotonic()))
        flags = part.flags.format(calm=int(3 * seconds)).split()
        print(f"{time.monotonic() - start:.0f} s: {' '.join(flags)}", flush=True)
        process = subprocess.Popen(
            [*command, *flags, "--seed", str(seed)], stdout=subprocess.DEVNULL
        )
        running.append(process)
    for process in running:
        if process.wait(WAIT_S + seconds):
            raise SystemExit("requests failed")


@contextmanager
def chromium() -> Iterator[Chrome]:
    options = ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(flag)
    options.add_argument("--hide-scrollbars")
    with Chrome(options=options, service=Service(shutil.which("chromedriver"))) as browser:
        yield browser


def take_dashboards(browser: Chrome, source: Source, html: Path) -> None:
    note = NOTE.format(
        datetime.now(timezone.utc), source.seconds / 60, len(os.sched_getaffinity(0))
    )
    chosen = [panel for name, titles in FRONT.items() for panel in panels_of(name, titles)]
    pages = {"dashboard": ("pdserve: panels of its dashboards", chosen, source)}
    for name in DASHBOARDS:
        pages[f"pdserve-{name}"] = (f"pdserve: {name}", panels_of(f"pdserve-{name}"), source)
    for pool in POOLS:
        of_pool = replace(source, chosen={"pool": pool})
        panels = panels_of("pdserve-pool")
        pages[f"pdserve-{pool}-pool"] = (f"pdserve: {pool} pool", panels, of_pool)
    for name, (title, panels, asked) in pages.items():
        html.write_text(page(title, note, panels, asked, WIDTH))
        browser.get(html.as_uri())
        # The README's is to be sharp on dense screens, too.
        take(browser, name, scale=2 if name == "dashboard" else 1)


def take_chat_page(browser: Chrome, url: str) -> None:
    browser.get(url)
    wait = WebDriverWait(browser, WAIT_S)
    wait.until(lambda _: "pdserve-tiny" in browser.find_element(By.ID, "model").text)
    browser.switch_to.active_element.send_keys("Tell me a story.", Keys.ENTER)
    wait.until(lambda _: browser.find_element(By.ID, "timing").is_displayed())
    browser.find_element(By.CSS_SELECTOR, "#timing summary").click()
    take(browser, "chat-page", scale=2)


def take(browser: Chrome, name: str, *, scale: int) -> None:
    """Save the whole page, however long it is."""
    size = {"width": WIDTH, "height": 800, "deviceScaleFactor": scale, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    height = browser.execute_script("return document.body.scrollHeight")
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {**size, "height": height})
    (PICTURES / f"{name}.png").write_bytes(browser.get_screenshot_as_png())


if __name__ == "__main__":
    main()
