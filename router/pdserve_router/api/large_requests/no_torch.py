"""Keeps torch, where it is installed, out of a router's processes."""

import os
import sys


def hide_torch() -> None:
    """Have this process find no torch where it is installed, as where it is not: transformers,
    here for its tokenizers, would import it for seconds and keep 180 MiB of it.
    """
    sys.modules["torch"] = None  # type: ignore[assignment]
    # It would advise to install it.
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
