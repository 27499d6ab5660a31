"""`format` of a JSON schema's strings, as patterns. Each takes no more than its RFC does."""

from collections.abc import Mapping

_YEAR = r"(?:[1-9]\d{3}|0[1-9]\d{2}|00[1-9]\d|000[1-9])"
_MONTH_DAY = (
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)"
    r"|02-(?:0[1-9]|1\d|2[0-8]))"
)
_DIVISIBLE_BY_4 = "(?:0[48]|[2468][048]|[13579][26])"
_DATE = rf"(?:{_YEAR}-{_MONTH_DAY}|(?:\d{{2}}{_DIVISIBLE_BY_4}|{_DIVISIBLE_BY_4}00)-02-29)"
_HOUR_MINUTE = r"(?:[01]\d|2[0-3]):[0-5]\d"
_TIME = rf"{_HOUR_MINUTE}:[0-5]\d(?:\.\d{{1,6}})?(?:Z|[+-]{_HOUR_MINUTE})"
_DAYS = r"(?:\d+D|\d+M(?:\d+D)?|\d+Y(?:\d+M(?:\d+D)?)?)"
_HOURS = r"T(?:\d+S|\d+M(?:\d+S)?|\d+H(?:\d+M(?:\d+S)?)?)"
# At most 61 characters of 63, and 247 of 253 together.
_LABEL = "[A-Za-z0-9]{1,30}(?:-[A-Za-z0-9]{1,30})?"
_HOSTNAME = rf"{_LABEL}(?:\.{_LABEL}){{0,3}}"
_BYTE = r"(?:25[0-5]|2[0-4]\d|1\d{2}|[1-9]?\d)"
_GROUP = "[0-9a-fA-F]{1,4}"
# "::" stands for one group at least: with n groups before it, at most 7 - n follow.
_IPV6 = "|".join(
    (
        f"(?:{_GROUP}:){{7}}{_GROUP}",
        f"(?:{_GROUP}:){{7}}:",
        f"::(?:{_GROUP}(?::{_GROUP}){{0,6}})?",
        *(f"(?:{_GROUP}:){{{n}}}:(?:{_GROUP}(?::{_GROUP}){{0,{6 - n}}})?" for n in range(1, 7)),
    )
)
_WORD = "[A-Za-z0-9_+-]+"
_URI_CHARS = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@/-]|%[0-9A-Fa-f]{2})*"

PATTERNS: Mapping[str, str] = {
    "date": _DATE,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": rf"P(?:{_DAYS}(?:{_HOURS})?|{_HOURS}|\d+W)",
    "email": rf"{_WORD}(?:\.{_WORD})*@[A-Za-z0-9]{{1,30}}(?:\.[A-Za-z0-9]{{1,30}}){{1,3}}",
    "hostname": _HOSTNAME,
    "ipv4": rf"(?:{_BYTE}\.){{3}}{_BYTE}",
    "ipv6": _IPV6,
    "time": _TIME,
    "uri": rf"[A-Za-z][A-Za-z0-9+.-]*://[A-Za-z0-9.-]+(?::\d{{1,4}})?(?:/{_URI_CHARS})?"
    rf"(?:\?{_URI_CHARS})?(?:#{_URI_CHARS})?",
    "uuid": "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
}
