"""Whether two processes mean the same text by a token id."""

import hashlib
from pathlib import Path


def tokenizer_digest(model_dir: str | Path) -> str:
    """Return the SHA-256 of the file that says which text each token id stands for; empty if the
    folder has none. Chat templates and the like are in other files: they are the router's alone.
    """
    path = Path(model_dir) / "tokenizer.json"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
