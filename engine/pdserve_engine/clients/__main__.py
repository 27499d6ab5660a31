"""python -m pdserve_engine.clients FD: started by SubprocessEngineClient alone."""

import asyncio
import ctypes
import signal
import sys

import uvloop

PR_SET_PDEATHSIG = 1


def main() -> int:
    """Serve on the inherited socket; the process's exit status."""
    # The worker decides when its engine ends, also when a signal goes to the whole group.
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    if sys.platform == "linux":
        # The socket tells as well, but not while the engine is being imported.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    from pdserve_engine.clients.child import serve  # takes seconds: after all that

    uvloop.install()
    return asyncio.run(serve(int(sys.argv[1])))


if __name__ == "__main__":
    sys.exit(main())
