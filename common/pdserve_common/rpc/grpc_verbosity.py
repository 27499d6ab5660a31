"""Keeps gRPC's own lines out of our logs: import this before grpc, which looks only then.

It writes to stderr, in a form of its own, what others do to its connections: a peer that goes, a
handshake that fails. Our logs and metrics say what comes of it. What is an error of this process
stays, unless the environment says otherwise.
"""

import os

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
