"""The router's process before it serves."""

import subprocess
import sys
from pathlib import Path

# The last of the router's imports never ends.
STARTING = """
import importlib.abc, sys, time

class Endless(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "pdserve_router.server":
            print("importing", flush=True)
            time.sleep(60)

sys.meta_path.insert(0, Endless())
from pdserve_router.__main__ import main
main()
"""


def test_sigterm_ends_a_router_that_is_still_importing(model_dir: Path) -> None:
    """By itself: were it the first process of a container, the system would not end it."""
    command = [sys.executable, "-c", STARTING, f"--model={model_dir}", "--decode=127.0.0.1:1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as router:
        try:
            assert router.stdout is not None
            assert router.stdout.readline() == "importing\n"
            router.terminate()
            assert router.wait(timeout=30) == 0
        finally:
            router.kill()
