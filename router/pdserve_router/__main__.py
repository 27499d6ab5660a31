"""The `pdserve-router` command."""

import contextlib
import ctypes
import dataclasses
import logging
import os
import signal
import sys
from types import FrameType
from typing import NoReturn

import uvloop

import pdserve_common.rpc.grpc_verbosity  # noqa: F401
from pdserve_common.config import parse_config, warn_of_unknown_variables
from pdserve_common.model_files.model_folder import find_model
from pdserve_common.observability.logging import setup_logging
from pdserve_router.api.large_requests.no_torch import hide_torch
from pdserve_router.config import RouterConfig
from pdserve_router.processes import run_processes

logger = logging.getLogger(__name__)

M_MMAP_THRESHOLD = -3
LARGE_BLOCK_BYTES = 1 << 18


def main() -> None:
    """Run a router. Exits with 0 after a signal, 1 if it cannot start, 2 on a bad flag."""
    # The system ignores it for the first process of a container, and imports take seconds.
    signal.signal(signal.SIGTERM, _stop_before_start)
    config = parse_config(RouterConfig, prog="pdserve-router")
    setup_logging(config.log_level, config.router_id)
    warn_of_unknown_variables(RouterConfig)
    hide_torch()
    _give_back_large_blocks()
    try:
        model = find_model(config.model, revision=config.revision, weights=False)
        config = dataclasses.replace(config, model=model)
        if config.workers > 1:
            sys.exit(run_processes(config, _run_one))
        _run(config)
    except (OSError, ValueError) as error:
        logger.error("cannot start: %s", error)
        sys.exit(1)


def _run(config: RouterConfig) -> None:
    from pdserve_router.api.large_requests.processes import EdgeSettings, fork_template
    from pdserve_router.server import serve

    template = fork_template(EdgeSettings.from_config(config))
    uvloop.run(serve(config, template))


def _run_one(config: RouterConfig) -> None:
    """Be one of several."""
    setup_logging(config.log_level, config.router_id)
    _run(config)


def _give_back_large_blocks() -> None:
    """Have glibc return the memory of large messages as soon as they are gone. By itself it learns
    from the first ones to keep it, in pieces that later ones do not fit into.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)


def _stop_before_start(signum: int, frame: FrameType | None) -> NoReturn:
    os._exit(0)  # until the event loop takes over, nothing is there to be closed


if __name__ == "__main__":
    main()
