"""The process behind EdgeProcesses: a fork of the router at its start, and later, if that is gone,
`python -m pdserve_router.api.large_requests.child FD SETTINGS`.

It loads the tokenizer once and forks a child for each request, so that one costs milliseconds to
make and takes its memory with it when it ends. It has one thread, and uses no gRPC: a fork is safe.
"""

import asyncio
import contextlib
import gc
import importlib
import io
import json
import logging
import os
import pickle
import signal
import socket
import sys
import threading
import traceback
from typing import TYPE_CHECKING, Any

from pdserve_common.errors import InvalidRequestError, PdserveError
from pdserve_common.observability.logging import setup_logging
from pdserve_common.processes.connection import Connection
from pdserve_common.processes.frames import FrameCodec
from pdserve_common.processes.lifecycle import be_child, confine, end_now, fork
from pdserve_router.api.large_requests.no_torch import hide_torch

if TYPE_CHECKING:
    from pdserve_router.requests.input.input_processor import InputProcessor

# A job is two messages: what is called with what, and the request. An answer refers to the number
# of its pieces.
CODEC: FrameCodec[bytes] = FrameCodec((bytes,))
# Sent by the router, by the template when it has loaded the tokenizer, and in front of a
# connection.
READY = b"r"
# Where jobs are. By name, as these modules import this one.
_JOBS = ("pdserve_router.api.http.app", "pdserve_router.api.grpc.service")
# Beside the process that streams, these have time.
_NICENESS = 5


def main() -> None:
    settings = json.loads(sys.argv[2])
    setup_logging(settings["log_level"], settings["router_id"])
    be_template(socket.socket(fileno=int(sys.argv[1])), settings)
    end_now(0)


def be_template(control: socket.socket, settings: dict[str, Any]) -> None:
    """Fork a child for each connection that comes over `control`, until that ends."""
    be_child()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system buries children
    os.nice(_NICENESS)
    if not control.recv(len(READY)):
        return  # the router could not start
    processor = _load(settings)
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page
    control.sendall(READY)
    while True:
        _, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not fds:
            return
        with socket.socket(fileno=fds[0]) as end:

            def serve() -> None:
                control.close()
                _serve(end, processor, settings)

            fork(serve)


def _load(settings: dict[str, Any]) -> "InputProcessor":
    hide_torch()
    # They take a second: after the signals are set.
    for name in _JOBS:
        importlib.import_module(name)
    from pdserve_router.requests.input.input_processor import InputProcessor
    from pdserve_router.requests.input.pictures import RequestPictures
    from pdserve_router.text.picture_processor import PictureProcessor
    from pdserve_router.text.tokenizer import Tokenizer

    model: str = settings["model"]
    processor = PictureProcessor.from_folder(model)
    return InputProcessor(
        Tokenizer(model, image_token_id=processor.image_token_id if processor else None),
        pictures=RequestPictures(
            processor, max_images_per_prompt=settings["max_images_per_prompt"]
        ),
        **settings["input_processor"],
    )


def _serve(end: socket.socket, processor: "InputProcessor", settings: dict[str, int]) -> None:
    """Do one job."""
    _bound(settings["max_memory_bytes"], settings["timeout_s"])
    with contextlib.suppress(OSError):  # nobody waits for it any more
        messages = Connection(end, CODEC).messages()
        (call, _), (raw, _) = next(messages), next(messages)
        function, args = pickle.loads(call)
        threading.Thread(target=_end_with, args=(end,), daemon=True).start()
        value, error = _do(processor, settings["max_memory_bytes"], function, raw, args)
        answer, num_pieces = _pickle(value, error)
        end.sendall(CODEC.header(bytes, len(answer), num_pieces))
        end.sendall(answer)


def _bound(max_memory_bytes: int, timeout_s: float) -> None:
    """Have the system end this process when it takes too long, or needs too much."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    confine(max_memory_bytes)


def _end_with(end: socket.socket) -> None:
    """The router sends nothing more, but closes the connection when nobody waits any more."""
    end.recv(1)
    os._exit(0)


def _do(
    processor: "InputProcessor", max_memory_bytes: int, function: object, raw: bytes, args: object
) -> tuple[object, PdserveError | str | None]:
    """Return what the function returns, and its PdserveError, or what else went wrong."""
    value: object = None
    error: PdserveError | str | None = None
    try:
        value = asyncio.run(function(processor, raw, *args))  # type: ignore[operator,misc]
    except PdserveError as expected:
        error = expected
    except MemoryError:
        error = InvalidRequestError(
            f"the request of {len(raw)} bytes needs more than {max_memory_bytes} bytes of memory"
        )
    except Exception:
        error = traceback.format_exc()
    return value, error


def _pickle(value: object, error: PdserveError | str | None) -> tuple[bytes, int]:
    """Return an answer in pieces, and how many these are. What a job returns may have a tuple of
    thousands of inputs, as its `inputs` or as one of several values: each of them is a piece, so
    that the router's event loop takes them over one by one. The last piece is the whole, which
    refers to those before it.
    """
    tuples = value if isinstance(value, tuple) else (getattr(value, "inputs", ()),)
    inputs = [each for part in tuples if isinstance(part, tuple) for each in part]
    data = io.BytesIO()
    pickler = pickle.Pickler(data, pickle.HIGHEST_PROTOCOL)
    for piece in (*inputs, (value, error)):
        pickler.dump(piece)
    return data.getvalue(), len(inputs) + 1


if __name__ == "__main__":
    logging.captureWarnings(True)
    main()
