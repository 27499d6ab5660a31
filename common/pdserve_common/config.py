"""One frozen dataclass per process, turned into flags. Precedence: flag, environment, default.

    @dataclass(frozen=True, slots=True, kw_only=True)
    class PrefillConfig:
        block_size: int = opt(16, "Tokens per KV cache block.")

`parse_config(PrefillConfig, argv, prog="pdserve-prefill")` reads `--block-size`, then
`PDSERVE_BLOCK_SIZE`.
"""

import argparse
import dataclasses
import os
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

ENV_PREFIX = "PDSERVE_"

# Values of settings that several processes have.
LogLevel = Literal["debug", "info", "warning", "error"]
Transport = Literal["any", "shm", "tcp", "rdma"]

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
    return cls(**values)


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
    converter: Callable[[str], Any] = base
    return converter


def _parse_bool(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError(f"{text!r} is not a boolean (true or false)")
