"""Whose a request is: tenants share neither sessions nor what is cached."""

import hashlib
from collections.abc import Mapping
from contextvars import ContextVar

from pdserve_common.errors import InvalidRequestError
from pdserve_common.limits.validation import id_problem

SESSION_HEADER = "x-session-id"
_CLIENT_ID_CHARS = 32

# The name of the current request's API key; "" if keys are not asked for.
tenant_var: ContextVar[str] = ContextVar("tenant", default="")


def session_id(headers: Mapping[str, str]) -> str:
    """Return the session that a call's headers name; "" if they name none. Raises
    InvalidRequestError for one that is too long or not printable ASCII.
    """
    value = headers.get(SESSION_HEADER, "")
    if value and (problem := id_problem(SESSION_HEADER, value)) is not None:
        raise InvalidRequestError(problem, field=SESSION_HEADER)
    return value


def owned(tenant: str, value: str) -> str:
    """Return 64 characters that stand for a tenant's value, and for that of nobody else."""
    # The length says where the name ends. A client's text may have half of a surrogate pair.
    text = f"{len(tenant)}:{tenant}{value}"
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def client_id(tenant: str, address: str) -> str:
    """Return what stands for a tenant on workers, or without API keys for an address."""
    return owned(tenant, "" if tenant else address)[:_CLIENT_ID_CHARS]
