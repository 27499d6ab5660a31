"""Plugins of distributions that are installed as pip would install them."""

import importlib
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from pdserve_common.types.sampling_params import SamplingParams
from pdserve_engine.runner.load.plugins import (
    GENERAL_PLUGINS,
    LOGITS_PROCESSORS,
    load_general_plugins,
    load_logits_processors,
)

SOURCE = """
started = []


class BanOdd:
    def __init__(self, params, vocab_size):
        self.vocab_size = vocab_size

    def __call__(self, output_token_ids, logits):
        logits[1::2] = float("-inf")
        return logits


def start():
    started.append("start")


def start_too():
    started.append("start_too")


def fail():
    raise OSError("no such device")


a_number = 7
"""


class Plugin(NamedTuple):
    group: str
    name: str
    value: str


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """install(distribution, *plugins) -> the module its plugins may name, as `{module}`."""

    def install(distribution: str, *plugins: Plugin) -> str:
        module = distribution.replace("-", "_")
        site = tmp_path / distribution
        info = site / f"{module}-1.0.dist-info"
        info.mkdir(parents=True)
        (site / f"{module}.py").write_text(SOURCE)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1\n")
        lines = [f"[{p.group}]\n{p.name} = {p.value.format(module=module)}\n" for p in plugins]
        (info / "entry_points.txt").write_text("\n".join(lines))
        monkeypatch.syspath_prepend(site)
        monkeypatch.delitem(sys.modules, module, raising=False)
        return module

    return install


def test_nothing_is_installed_by_default() -> None:
    assert load_general_plugins() == ()
    assert load_logits_processors() == {}


def test_a_logits_processor_is_found_under_its_name(install: Callable[..., str]) -> None:
    install("even-tokens", Plugin(LOGITS_PROCESSORS, "ban-odd", "{module}:BanOdd"))
    factories = load_logits_processors()
    assert list(factories) == ["ban-odd"]
    processor = factories["ban-odd"](SamplingParams(), 6)
    assert processor([], torch.zeros(6)).isneginf().tolist() == [False, True] * 3


def test_general_plugins_run_once_by_name(install: Callable[..., str]) -> None:
    module = install("late", Plugin(GENERAL_PLUGINS, "b", "{module}:start"))
    other = install("early", Plugin(GENERAL_PLUGINS, "a", "{module}:start_too"))
    assert load_general_plugins() == ("a", "b")
    assert importlib.import_module(module).started == ["start"]
    assert importlib.import_module(other).started == ["start_too"]
    assert load_logits_processors() == {}


BAD: Sequence[tuple[str, str, str]] = (
    (LOGITS_PROCESSORS, "{module}_gone:BanOdd", "cannot be imported: ModuleNotFoundError"),
    (LOGITS_PROCESSORS, "{module}:Missing", "cannot be imported: AttributeError"),
    (LOGITS_PROCESSORS, "{module}:a_number", "is no callable but int"),
    (GENERAL_PLUGINS, "{module}:a_number", "is no callable but int"),
    (GENERAL_PLUGINS, "{module}:fail", r"raised OSError\('no such device'\)"),
)


@pytest.mark.parametrize(("group", "value", "reason"), BAD)
def test_a_bad_plugin_is_refused_by_name(
    install: Callable[..., str], group: str, value: str, reason: str
) -> None:
    module = install("bad-idea", Plugin(group, "oops", value))
    load = load_general_plugins if group == GENERAL_PLUGINS else load_logits_processors
    wanted = (
        rf"plugin oops = {re.escape(value.format(module=module))} \({re.escape(group)}\) "
        rf"of distribution bad-idea: {reason}"
    )
    with pytest.raises(ValueError, match=wanted):
        load()


def test_a_name_belongs_to_one_distribution(install: Callable[..., str]) -> None:
    for distribution in ("one", "two"):
        install(distribution, Plugin(LOGITS_PROCESSORS, "same", "{module}:BanOdd"))
    with pytest.raises(ValueError, match=r"plugin same .*two: another plugin has the same name"):
        load_logits_processors()
