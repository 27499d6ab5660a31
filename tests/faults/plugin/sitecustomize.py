"""What every process of a Cluster does before anything else.

It ends when the test does, however that ends: nobody else holds the other end of its stdin. And on
SIGUSR2 its main thread, which is the event loop's, sleeps for as long as a file says.
"""

import functools
import os
import signal
import threading
import time
from pathlib import Path


def _end_with_the_test() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


def _freeze(path: Path, signum: int, frame: object) -> None:
    time.sleep(float(path.read_text()))


# An engine's own process, which has no stdin, is not to find it: it ends with its worker.
if (path := os.environ.pop("PDSERVE_FAULTS_FREEZE", None)) is not None:
    signal.signal(signal.SIGUSR2, functools.partial(_freeze, Path(path)))
    threading.Thread(target=_end_with_the_test, daemon=True).start()
