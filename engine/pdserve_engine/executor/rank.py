"""python -m pdserve_engine.executor.rank CALLS STEPS CORES: started by MultiprocExecutor alone."""

import os
import socket
import sys

from pdserve_common.processes.cores import confine_process, parse_cores
from pdserve_common.processes.lifecycle import be_child, end_now


def main() -> None:
    """Serve on the inherited sockets, on CORES unless that is empty, and end the process."""
    be_child()
    if cores := sys.argv[3]:
        confine_process(parse_cores(cores))  # before OpenMP counts them
    # gloo and NCCL listen on an address of the host otherwise.
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
    from pdserve_engine.executor.rank_server import serve  # takes seconds: after all that

    serve(socket.socket(fileno=int(sys.argv[1])), socket.socket(fileno=int(sys.argv[2])))
    end_now(0)  # the worker waits for it


if __name__ == "__main__":
    main()
