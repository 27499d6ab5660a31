"""The file with API keys: one a line, `key` or `name:key`, and the limits of its name behind it."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from pdserve_common.limits.validation import PRIORITY_LIMIT

MAX_FILE_BYTES = 1 << 20
MIN_KEY_CHARS = 16
# In the place of a key: what holds for all names that do not say otherwise.
EVERYBODY = "*"
# What each limit may be.
RANGES = {
    "requests_per_minute": (1, 10**9),
    "tokens_per_minute": (1, 10**12),
    "max_concurrent_requests": (1, 10**6),
    "best_priority": (-PRIORITY_LIMIT, PRIORITY_LIMIT),
    "share": (1, 1000),
}

_KEY = re.compile(rf"[!-~]{{{MIN_KEY_CHARS},}}")
# A limit in the key's place: what stands before it is the key, and no name.
_LIMIT = re.compile(r"[a-z]+(_[a-z]+)+=.*")
_NOT_IN_NAMES = re.compile(r"[:\s]")
_NUMBER = re.compile(r"-?[0-9]{1,18}")

Fields = Mapping[str, int]


def read_api_keys(path: str) -> dict[str, tuple[str, Fields]]:
    """Return each key's name, "" of one that has none, and its limits, by their fields of
    TenantLimits. Keys of one name have the same limits, which one of their lines says. Raises
    OSError or ValueError; neither says what is in the file.
    """
    names: dict[str, str] = {}
    # By name and, of one without, key.
    limits: dict[tuple[str, str], Fields] = {}
    everybody: Fields = {}
    for number, line in enumerate(_read_text(path).splitlines(), 1):
        if not (entry := line.strip()) or entry.startswith("#"):
            continue
        where = f"api_keys_file {path}: line {number}"
        name, _, rest = (part.strip() for part in entry.rpartition(":"))
        key, *words = rest.split() or [""]
        is_everybody = (name, key) == ("", EVERYBODY)
        if not is_everybody:
            _check_owner(name, key, f"in line {number}", path)
        fields = _parse_limits(words, where)
        if is_everybody:
            _check_same(everybody, fields, where)
            everybody = fields
            continue
        names[key] = name
        if fields:
            _check_same(limits.setdefault(_owner(name, key), fields), fields, where)
    if not names:
        raise ValueError(f"api_keys_file {path} has no keys, must have at least 1")
    return {
        key: (name, {**everybody, **limits.get(_owner(name, key), {})})
        for key, name in names.items()
    }


def _owner(name: str, key: str) -> tuple[str, str]:
    return name, "" if name else key


def _check_owner(name: str, key: str, where: str, path: str) -> None:
    """Raises ValueError, which shows neither: what stands in a name's place may be a key."""
    if not _KEY.fullmatch(key):
        raise ValueError(
            f"api_keys_file {path}: the key {where} must be {MIN_KEY_CHARS} or more visible ASCII "
            "characters"
        )
    if _LIMIT.fullmatch(key):
        raise ValueError(
            f"api_keys_file {path}: a limit {where} stands where the key must: key LIMIT=NUMBER or "
            "name:key LIMIT=NUMBER"
        )
    if _NOT_IN_NAMES.search(name):
        raise ValueError(
            f"api_keys_file {path}: the name {where} must be without colons and white space"
        )


def _check_same(before: Fields, fields: Fields, where: str) -> None:
    if before and before != fields:
        raise ValueError(f"{where} has other limits than a line of the same name above it")


def _parse_limits(words: Sequence[str], where: str) -> Fields:
    """Raises ValueError for what is no limit, or comes twice."""
    fields: dict[str, int] = {}
    for word in words:
        field, _, value = word.partition("=")
        # What is no limit may be a part of a key.
        if field not in RANGES:
            raise ValueError(
                f"{where} must have behind its key only {', '.join(RANGES)}, each with =NUMBER"
            )
        low, high = RANGES[field]
        if not _NUMBER.fullmatch(value) or not low <= int(value) <= high:
            raise ValueError(f"{where}: {field} must be a whole number from {low} to {high}")
        if field in fields:
            raise ValueError(f"{where} has {field} twice")
        fields[field] = int(value)
    return fields


def _read_text(path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise OSError(f"api_keys_file {path} cannot be read: {error.strerror}") from error
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"api_keys_file {path} has more than {MAX_FILE_BYTES} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ValueError(f"api_keys_file {path} is no UTF-8 text") from None
