"""For scripts that the environments of clients run: every check, whatever became of the others.

Not imported by tests: those environments have no pdserve.
"""

import sys
import traceback
from collections.abc import Callable
from importlib.metadata import version
from typing import TypeVar

Check = Callable[[], object]
E = TypeVar("E", bound=Exception)


def run_checks(package: str, *checks: Check) -> None:
    """Print the package's version and a line for each check; exit with 1 if one failed."""
    print(f"version {version(package)}")
    failed = [check for check in checks if not _passes(check)]
    sys.exit(1 if failed else 0)


def error_of(kind: type[E], call: Check) -> E:
    """Return the error that a call must end with."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def _passes(check: Check) -> bool:
    try:
        check()
    except Exception as error:
        traceback.print_exc()
        print(f"FAILED {check.__name__}: {error}")
        return False
    print(f"ok {check.__name__}")
    return True
