"""What every process of a Cluster does before anything else.

It ends when the test does, however that ends: nobody else holds the other end of its stdin. And on
SIGUSR2 its main thread, which is the event loop's, sleeps for as long as a file says.
"""

import os
import signal
import threading
import time
from pathlib import Path


def _end_with_the_test() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


def _freeze(signum: int, frame: object) -> None:
    time.sleep(float(Path(os.environ["PDSERVE_FAULTS_FREEZE"]).read_text()))


if "PDSERVE_FAULTS_FREEZE" in os.environ:
    signal.signal(signal.SIGUSR2, _freeze)
    threading.Thread(target=_end_with_the_test, daemon=True).start()
