from dataclasses import dataclass
from typing import Literal

import pytest

from pdserve_common.config import opt, parse_config, warn_of_unknown_variables


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleConfig:
    """An example."""

    block_size: int = opt(16, "Tokens per block.")
    ratio: float | None = opt(None, "A share, 100% at most.")
    enable_caching: bool = opt(True, "Share blocks.")
    transport: Literal["nixl", "local"] = opt("nixl", "How blocks travel.")
    peers: tuple[str, ...] = opt((), "Addresses.")
    keys_file: str | None = opt(None, "File of keys.")

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size is {self.block_size}, must be at least 1")


def parse(*argv: str, **environ: str) -> ExampleConfig:
    return parse_config(ExampleConfig, argv, prog="example", environ=environ)


def test_defaults_hold_without_flags() -> None:
    assert parse() == ExampleConfig()


def test_a_flag_beats_the_environment_and_that_beats_the_default() -> None:
    assert parse(PDSERVE_BLOCK_SIZE="32").block_size == 32
    assert parse("--block-size", "64", PDSERVE_BLOCK_SIZE="32").block_size == 64


def test_every_type_parses() -> None:
    config = parse("--ratio=0.5", "--no-enable-caching", "--transport=local", "--peers=a:1, b:2")
    assert config == ExampleConfig(
        ratio=0.5, enable_caching=False, transport="local", peers=("a:1", "b:2")
    )
    assert parse(PDSERVE_ENABLE_CACHING="false").enable_caching is False


@pytest.mark.parametrize(
    ("argv", "environ", "message"),
    [
        (["--block-size", "0"], {}, "block_size is 0, must be at least 1"),
        (["--block-size", "x"], {}, "invalid int value: 'x'"),
        (["--transport", "pigeon"], {}, "'pigeon' is not one of nixl, local"),
        (["--blok-size", "1"], {}, "unrecognized arguments: --blok-size 1"),
        ([], {"PDSERVE_BLOCK_SIZE": "x"}, "PDSERVE_BLOCK_SIZE='x'"),
        ([], {"PDSERVE_ENABLE_CACHING": "maybe"}, "'maybe' is not a boolean"),
        ([], {"PDSERVE_RATIO": "nan"}, "PDSERVE_RATIO='nan': 'nan' is no finite number"),
        (["--ratio=inf"], {}, "--ratio: 'inf' is no finite number"),
        (["--ratio=x"], {}, "--ratio: 'x' is no finite number"),
        ([], {"PDSERVE_KEYS_FILE": ""}, "PDSERVE_KEYS_FILE is empty: give it a value or leave it"),
        (["--keys-file="], {}, "--keys-file is empty: give it a value or leave it out"),
    ],
)
def test_a_bad_value_ends_with_usage_and_a_reason(
    argv: list[str],
    environ: dict[str, str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        parse(*argv, **environ)
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_variables_that_are_no_settings_are_named(caplog: pytest.LogCaptureFixture) -> None:
    environ = {"PDSERVE_KEYS_FILE": "/keys", "PDSERVE_KERNELS_DIR": "/kernels", "HOME": "/root"}
    warn_of_unknown_variables(ExampleConfig, environ)
    assert not caplog.records
    warn_of_unknown_variables(ExampleConfig, {**environ, "PDSERVE_KEY_FILE": "/keys"})
    assert caplog.messages == ["ignored, no settings of this process: PDSERVE_KEY_FILE"]


def test_help_shows_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    text = " ".join(capsys.readouterr().out.split())
    for expected in ("--block-size", "Tokens per block.", "env: PDSERVE_RATIO", "100% at most"):
        assert expected in text
