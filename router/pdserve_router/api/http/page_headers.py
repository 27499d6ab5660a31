"""Headers of the pages that a router serves."""

import base64
import hashlib
import re


def page_headers(page: bytes) -> dict[str, str]:
    """The browser runs what stands in the page and nothing else: an answer cannot bring code."""
    policy = [
        "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'",
        *(f"{element}-src {_hashes(page, element)}" for element in ("script", "style")),
    ]
    return {
        "content-security-policy": "; ".join(policy),
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }


def _hashes(page: bytes, element: str) -> str:
    """Return sources for all elements of a kind."""
    texts = re.findall(rf"<{element}>(.*?)</{element}>".encode(), page, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(text).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"
