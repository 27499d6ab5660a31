"""Fixtures of the fuzz targets: a real stack, watched, and how many examples there are."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import pytest

# Test modules import system, messages, ...
sys.path.append(str(Path(__file__).parent))

from in_services.sitecustomize import FOLDER as TASKS_FOLDER
from system import ADAPTERS, MAX_MODEL_LEN, PoolingSystem, System

from support.adapters import write_adapter
from support.stack import running_stack

AnySystem = TypeVar("AnySystem", bound=System)
FOLDER = Path(__file__).parent
MODEL = FOLDER.parents[1] / "models" / "pdserve-tiny"


@pytest.fixture(scope="session")
def watched_system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """A stack of one P and one D that all targets of a process share, with an adapter and another
    one that may be loaded.
    """
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(ADAPTERS):
        write_adapter(MODEL, root / name, seed=seed, r=2, target_modules=["q_proj"])
    lora = (f"{ADAPTERS[0]}={root / ADAPTERS[0]}",)
    fields = {"lora": lora, "lora_root": str(root), "lora_updates": True}
    with watched(tmp_path_factory, System, **fields) as system:
        yield system


@pytest.fixture(scope="session")
def watched_pooling_system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolingSystem]:
    """The same of one P whose model pools."""
    with watched(tmp_path_factory, PoolingSystem, runner="pooling") as system:
        yield system


@contextlib.contextmanager
def watched(
    tmp_path_factory: pytest.TempPathFactory, kind: type[AnySystem], **fields: object
) -> Iterator[AnySystem]:
    tasks_folder = tmp_path_factory.mktemp("tasks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(FOLDER / "in_services"), *_python_path()]))
        patch.setenv(TASKS_FOLDER, str(tasks_folder))
        fields |= {"model": MODEL, "num_threads": 1, "max_model_len": MAX_MODEL_LEN}
        with running_stack(tmp_path_factory.mktemp("logs"), **fields) as stack:
            yield kind(stack, tasks_folder)


@pytest.fixture
def system(watched_system: System) -> Iterator[System]:
    """The stack; each target leaves it as it was."""
    yield watched_system
    watched_system.assert_nothing_left()


@pytest.fixture
def pooling_system(watched_pooling_system: PoolingSystem) -> Iterator[PoolingSystem]:
    """As `system`."""
    yield watched_pooling_system
    watched_pooling_system.assert_nothing_left()


def _python_path() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
