"""The `pdserve-router` command."""

import logging
import sys

import uvloop

from pdserve_common.config import parse_config
from pdserve_common.logging import setup_logging
from pdserve_router.config import RouterConfig
from pdserve_router.server import serve

logger = logging.getLogger(__name__)


def main() -> None:
    """Run a router. Exits with 0 after a signal, 1 if it cannot start, 2 on a bad flag."""
    config = parse_config(RouterConfig, prog="pdserve-router")
    setup_logging(config.log_level, config.router_id)
    try:
        uvloop.run(serve(config))
    except (OSError, ValueError) as error:
        logger.error("cannot start: %s", error)
        sys.exit(1)


if __name__ == "__main__":
    main()
