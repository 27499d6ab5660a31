"""python -m pdserve_engine.grammar FD: started by CompilerProcess alone."""

import socket
import sys

from pdserve_common.processes.lifecycle import be_child


def main() -> None:
    """Compile what comes over the inherited socket until its other end closes."""
    be_child()
    sys.modules["torch"] = None  # type: ignore[assignment]  # seconds to import, and not needed
    from pdserve_engine.grammar.compiler_process import serve

    serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
