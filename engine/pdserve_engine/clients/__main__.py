"""python -m pdserve_engine.clients FD: started by SubprocessEngineClient alone."""

import asyncio
import signal
import sys

import uvloop

from pdserve_common.confined import die_with_parent
from pdserve_common.processes import end_now


def main() -> None:
    """Serve on the inherited socket, and end the process."""
    # The worker decides when its engine ends, also when a signal goes to the whole group.
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    # The socket tells as well, but not while the engine is being imported.
    die_with_parent()
    from pdserve_engine.clients.child import serve  # takes seconds: after all that

    uvloop.install()
    end_now(asyncio.run(serve(int(sys.argv[1]))))  # the worker waits for it


if __name__ == "__main__":
    main()
