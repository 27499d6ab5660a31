"""The clients that `make clients` installs."""

from pathlib import Path

FOLDER = Path(__file__).parent
SCRIPTS = FOLDER / "scripts"
ROOT = FOLDER.parent.parent
INSTALLED = ROOT / ".clients"
NPM = INSTALLED / "npm"
MODEL = ROOT / "models" / "pdserve-tiny"


def command_of(client: str, command: str = "python") -> Path:
    """Return a command of a client's environment."""
    return INSTALLED / client / "bin" / command
