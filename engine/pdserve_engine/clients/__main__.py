"""python -m pdserve_engine.clients FD: started by SubprocessEngineClient alone."""

import asyncio
import sys

import uvloop

from pdserve_common.processes.lifecycle import be_child, end_now


def main() -> None:
    """Serve on the inherited socket, and end the process."""
    be_child()
    from pdserve_engine.clients.child import serve  # takes seconds: after all that

    uvloop.install()
    end_now(asyncio.run(serve(int(sys.argv[1]))))  # the worker waits for it


if __name__ == "__main__":
    main()
