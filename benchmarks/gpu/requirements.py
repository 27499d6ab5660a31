"""What a machine has of what the parts need."""

import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

SHOWN = ("torch", "triton", "nixl-cu13", "transformers", "flash_attn_3")
# Of pyproject's lists those that run on a GPU: services, and tests with their plugins.
EXTRAS = ("engine", "worker", "router")
FOR_TESTS = ("hypothesis", "peft", "prometheus-client", "psutil", "pytest", "pytest-asyncio")
# Each of a distribution's names will do.
SAME = {"nixl-cu13": ("nixl-cu13", "nixl-cu12", "nixl")}
NAME = re.compile(r"[A-Za-z0-9._-]+")


def describe_machine(root: Path) -> list[str]:
    """Return lines about Python, the packages that matter most, and those that are missing."""
    found = [f"{name} {_version(name) or 'missing'}" for name in SHOWN]
    lines = [", ".join([f"Python {sys.version.split()[0]}", *found])]
    if missing := [name for name in required(root) if _version(name) is None]:
        lines.append(f"missing, so that parts may fail: {' '.join(missing)} (make gpu-wheels)")
    return lines


def required(root: Path) -> list[str]:
    """Return the names of distributions that the parts need, as the project lists them."""
    text = (root / "pyproject.toml").read_text()
    names = set(FOR_TESTS)
    for title in ("dependencies", *EXTRAS):
        match = re.search(rf"^{title} = \[\n(.*?)^\]", text, re.DOTALL | re.MULTILINE)
        assert match, title
        items = re.findall(r'^  "([^"]+)"', match[1], re.MULTILINE)
        names |= {found[0] for item in items if (found := NAME.match(item))}
    return sorted(names - {"pdserve"})


def _version(name: str) -> str | None:
    for other in SAME.get(name, (name,)):
        try:
            return version(other)
        except PackageNotFoundError:
            pass
    return None


if __name__ == "__main__":
    print(*required(Path(__file__).parents[2]))
