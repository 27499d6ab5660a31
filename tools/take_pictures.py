"""Takes the pictures of the docs from a running system: `make pictures`.

Starts a stack with the bundled model and a Prometheus that watches it, loads it for some minutes,
takes the chat page with headless Chromium and draws the dashboards (`render_dashboards.py`).
"""

import argparse
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from pdserve_client.config import StackConfig
from pdserve_client.stack import Stack

ROOT = Path(__file__).parent.parent
PICTURES = ROOT / "docs" / "images"
WINDOW = (1000, 1040)
WAIT_S = 60
# In turns, so that the curves have something to show: clients, and tokens of prompts and answers.
LOADS = ((1, 128, 32), (6, 512, 64), (3, 1024, 16))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=3.0, help="how long the load goes on")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, running_stack(Path(folder)) as stack:
        with prometheus(Path(folder), stack) as url:
            load(stack, seconds=args.minutes * 60)
            draw_dashboards(url, args.minutes)
        take_chat_page(f"http://127.0.0.1:{stack.http_port}/", PICTURES / "chat-page.png")


@contextmanager
def running_stack(folder: Path) -> Iterator[Stack]:
    ports = dict.fromkeys(("grpc_port", "http_port", "metrics_port", "worker_port"), 0)
    model = str(ROOT / "models" / "pdserve-tiny")
    stack = Stack(StackConfig(model=model, log_dir=str(folder / "logs"), **ports))
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
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        for clients, input_len, output_len in LOADS:
            print(f"\r{max(0, left):4.0f} s of load left\x1b[K", end="", flush=True)
            command = [sys.executable, "-m", "pdserve_client", "bench"]
            command += ["--address", stack.grpc_address, "--num-requests", str(10 * clients)]
            command += ["--concurrency", str(clients), "--input-len", str(input_len)]
            command += ["--output-len", str(output_len)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            left = end - time.monotonic()
    print()


def draw_dashboards(url: str, minutes: float) -> None:
    script = ROOT / "tools" / "render_dashboards.py"
    flags = ["--minutes", str(minutes), "--rate-interval", "15s"]
    subprocess.run([sys.executable, str(script), url, str(PICTURES), *flags], check=True)


def take_chat_page(url: str, out: Path) -> None:
    options = ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(flag)
    with (
        urllib.request.urlopen(url, timeout=WAIT_S),
        Chrome(options=options, service=Service(shutil.which("chromedriver"))) as browser,
    ):
        browser.set_window_size(*WINDOW)
        browser.get(url)
        wait = WebDriverWait(browser, WAIT_S)
        wait.until(lambda _: "pdserve-tiny" in browser.find_element(By.ID, "model").text)
        browser.switch_to.active_element.send_keys("Tell me a story.", Keys.ENTER)
        wait.until(lambda _: browser.find_element(By.ID, "timing").is_displayed())
        browser.find_element(By.CSS_SELECTOR, "#timing summary").click()
        browser.save_screenshot(str(out))


if __name__ == "__main__":
    main()
