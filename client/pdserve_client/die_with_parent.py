"""Becomes another program that gets SIGTERM when the parent is killed.

    python die_with_parent.py PARENT_PID PROGRAM ARGUMENT...

It is run by its path, and not by `preexec_fn`: that is Python in a forked copy of the parent, where
gRPC's threads begin anew and take messages from the parent's streams.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent_pid, program, *arguments = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(parent_pid):
            # It was killed before it could be watched.
            sys.exit(1)
    os.execv(program, [program, *arguments])


if __name__ == "__main__":
    main()
