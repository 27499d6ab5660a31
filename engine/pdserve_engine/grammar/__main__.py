"""python -m pdserve_engine.grammar FD: started by CompilerProcess alone."""

import signal
import socket
import sys


def main() -> None:
    """Compile what comes over the inherited socket until its other end closes."""
    # The engine decides when its compiler ends, also when a signal goes to the whole group.
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    sys.modules["torch"] = None  # type: ignore[assignment]  # seconds to import, and not needed
    from pdserve_engine.grammar.child import serve

    serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
