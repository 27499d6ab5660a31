"""Which versions of the Attach stream this code speaks; the KvLink has its own (`types/kv.py`)."""

# Raise it with each change that a peer without it would misunderstand, and MIN_PROTOCOL_VERSION
# when the older ways are deleted. 0 is what peers send that know of no versions.
PROTOCOL_VERSION = 1
MIN_PROTOCOL_VERSION = 1


def agreed_version(peer_min: int, peer_max: int) -> int | None:
    """Return the highest version that a peer which speaks `peer_min` to `peer_max` speaks as well;
    None if there is none.
    """
    version = min(PROTOCOL_VERSION, peer_max)
    return version if version >= max(MIN_PROTOCOL_VERSION, peer_min) else None


def supported_versions() -> str:
    """Return the versions, for a refusal."""
    return f"{MIN_PROTOCOL_VERSION} to {PROTOCOL_VERSION}"
