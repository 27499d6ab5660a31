"""One frozen dataclass per process, turned into flags. Precedence: flag, environment, default.

    @dataclass(frozen=True, slots=True, kw_only=True)
    class PrefillConfig:
        block_size: int = opt(16, "Tokens per KV cache block.")

`parse_config(PrefillConfig, argv, prog="pdserve-prefill")` reads `--block-size`, then
`PDSERVE_BLOCK_SIZE`. Text that may be unset must not be empty: an empty name of a file of keys
would serve everybody.
"""

import argparse
import dataclasses
import logging
import math
import os
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

logger = logging.getLogger(__name__)

ENV_PREFIX = "PDSERVE_"
# Variables that are no fields of a config: of the CPU's kernels, and of clients.
_OTHER_VARIABLES = {"PDSERVE_KERNELS_DIR", "PDSERVE_CPU_ISA", "PDSERVE_API_KEY"}

# Values of settings that several processes have.
LogLevel = Literal["debug", "info", "warning", "error"]
Transport = Literal["any", "shm", "tcp", "rdma"]

# A name that clients ask for has at most so many characters.
MAX_NAME_CHARS = 128

T = TypeVar("T")


def opt(default: Any, description: str) -> Any:
    """A field with its default and the sentence that --help shows."""
    return dataclasses.field(default=default, metadata={"help": description})


def parse_config(
    cls: type[T],
    argv: Sequence[str] | None = None,
    *,
    prog: str,
    description: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> T:
    """Parse flags and environment into a `cls`; exits with usage and status 2 on a bad value."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description=description or (cls.__doc__ or "").strip(),
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add_config_flags(parser, cls)
    values = vars(parser.parse_args(argv))
    try:
        return build_config(cls, values, os.environ if environ is None else environ)
    except ValueError as error:
        parser.error(str(error))


def add_config_flags(parser: argparse.ArgumentParser, cls: type[Any]) -> None:
    """Add one flag for each field of the dataclass `cls`; unset flags parse to None."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        text = field.metadata.get("help", "")
        env = ENV_PREFIX + field.name.upper()
        kwargs: dict[str, Any] = {
            "default": argparse.SUPPRESS,
            "help": f"{text} (default: {_show(field.default)}; env: {env})".replace("%", "%%"),
        }
        if _base(hint) is bool:
            kwargs["action"] = argparse.BooleanOptionalAction
        else:
            kwargs["type"] = _converter(hint)
            kwargs["metavar"] = _metavar(hint)
        parser.add_argument("--" + field.name.replace("_", "-"), **kwargs)


def build_config(cls: type[T], flags: Mapping[str, Any], environ: Mapping[str, str]) -> T:
    """Build `cls` from parsed flags and the environment. Raises ValueError on a bad value."""
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        env = ENV_PREFIX + field.name.upper()
        if field.name in flags:
            values[field.name] = flags[field.name]
        elif env in environ:
            try:
                values[field.name] = _converter(hints[field.name])(environ[env])
            except (ValueError, argparse.ArgumentTypeError) as error:
                raise ValueError(f"{env}={environ[env]!r}: {error}") from error
        if values.get(field.name) == "" and hints[field.name] == str | None:
            given_by = "--" + field.name.replace("_", "-") if field.name in flags else env
            raise ValueError(f"{given_by} is empty: give it a value or leave it out")
    return cls(**values)


def warn_of_unknown_variables(cls: type[Any], environ: Mapping[str, str] = os.environ) -> None:
    """Log which variables look like settings and are none of `cls`: some may be misspelt."""
    known = {ENV_PREFIX + field.name.upper() for field in dataclasses.fields(cls)}
    unknown = {name for name in environ if name.startswith(ENV_PREFIX)} - known - _OTHER_VARIABLES
    if unknown:
        logger.warning("ignored, no settings of this process: %s", ", ".join(sorted(unknown)))


def parse_named_paths(field: str, values: Sequence[str]) -> dict[str, str]:
    """Return the path of each name of NAME=PATH. Raises ValueError."""
    paths: dict[str, str] = {}
    for value in values:
        name, separator, path = value.partition("=")
        if not separator or not path:
            raise ValueError(f"{field} has {value!r}, must be NAME=PATH")
        if not is_adapter_name(name):
            raise ValueError(
                f"{field} has the name {name!r}, must be 1 to {MAX_NAME_CHARS} characters of ASCII"
            )
        if name in paths:
            raise ValueError(f"{field} names {name!r} twice")
        paths[name] = path
    return paths


def is_adapter_name(name: str) -> bool:
    """True if clients can ask for an adapter by it."""
    return 1 <= len(name) <= MAX_NAME_CHARS and name.isascii() and name.isprintable()


def _show(default: Any) -> str:
    if default is None:
        return "unset"
    return ",".join(map(str, default)) or "none" if isinstance(default, tuple) else str(default)


def _base(hint: Any) -> Any:
    """X for X | None, else the hint itself."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        options = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        return options[0]
    return hint


def _metavar(hint: Any) -> str:
    base = _base(hint)
    if typing.get_origin(base) is typing.Literal:
        return "{" + ",".join(map(str, typing.get_args(base))) + "}"
    if typing.get_origin(base) is tuple:
        return "A,B,..."
    return str(getattr(base, "__name__", base)).upper()


def _converter(hint: Any) -> Callable[[str], Any]:
    base = _base(hint)
    if typing.get_origin(base) is typing.Literal:
        choices = typing.get_args(base)

        def choose(text: str) -> Any:
            for choice in choices:
                if text == str(choice):
                    return choice
            raise argparse.ArgumentTypeError(
                f"{text!r} is not one of {', '.join(map(str, choices))}"
            )

        return choose
    if typing.get_origin(base) is tuple:
        item = typing.get_args(base)[0]
        return lambda text: tuple(item(part.strip()) for part in text.split(",") if part.strip())
    if base is bool:
        return _parse_bool
    if base is float:
        return _parse_float
    converter: Callable[[str], Any] = base
    return converter


def _parse_float(text: str) -> float:
    # No setting has a meaning for nan or infinity, and few comparisons refuse nan.
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is no finite number")
    return value


def _parse_bool(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError(f"{text!r} is not a boolean (true or false)")
