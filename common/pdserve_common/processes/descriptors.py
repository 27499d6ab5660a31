"""File descriptors: as many as the system gives, shared out so that no port takes another's."""

import logging
import resource

logger = logging.getLogger(__name__)

# What the process needs for itself, for files and links to others: at least this, and this part.
_MIN_OWN = 64
_OWN_PART = 8
# The fewest connections that a port of clients gets.
_MIN_SHARE = 16


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open files to the hard one: the soft one is small (1024) for the sake
    of programs that use select().
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as error:
            logger.warning("limit of open files: %d, cannot be %d: %s", soft, hard, error)
            return
    logger.info("limit of open files: %d, was %d", hard, soft)


def descriptor_limit() -> int:
    """Return how many files may be open."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if limit == resource.RLIM_INFINITY else limit


def share_descriptors(*, reserved: int, max_http: int, max_grpc: int) -> tuple[int, int]:
    """Return how many HTTP and gRPC connections fit into the limit of open files, besides
    `reserved` descriptors and those of the process itself: two thirds and one. Raises ValueError if
    next to none do.
    """
    limit = descriptor_limit()
    left = limit - reserved - max(_MIN_OWN, limit // _OWN_PART)
    num_http = min(max_http, left * 2 // 3)
    num_grpc = min(max_grpc, left - num_http)
    if num_http < min(max_http, _MIN_SHARE) or num_grpc < min(max_grpc, _MIN_SHARE):
        raise ValueError(
            f"the limit of open files (ulimit -n) is {limit}, must be "
            f"{_MIN_OWN + reserved + 3 * _MIN_SHARE} or more"
        )
    return num_http, num_grpc
