"""python -m pdserve_engine.clients FD: started by SubprocessEngineClient alone."""

import asyncio
import signal
import sys

import uvloop

from pdserve_common.confined import die_with_parent


def main() -> int:
    """Serve on the inherited socket; the process's exit status."""
    # The worker decides when its engine ends, also when a signal goes to the whole group.
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    # The socket tells as well, but not while the engine is being imported.
    die_with_parent()
    from pdserve_engine.clients.child import serve  # takes seconds: after all that

    uvloop.install()
    return asyncio.run(serve(int(sys.argv[1])))


if __name__ == "__main__":
    sys.exit(main())
