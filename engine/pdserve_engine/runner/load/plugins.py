"""Code that other distributions add to a worker through entry points."""

from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from pdserve_engine.sampling.processors import LogitsProcessorFactory

# Callables without arguments, run once before the model is loaded, for what they bring about.
GENERAL_PLUGINS = "pdserve.general_plugins"
# Factories of logits processors, under the names that requests use.
LOGITS_PROCESSORS = "pdserve.logits_processors"


def load_general_plugins() -> tuple[str, ...]:
    """Run the installed general plugins in the order of their names; return the names.

    For a process to call once. Raises ValueError that names the plugin, its distribution and the
    reason if one cannot be imported, is no callable or fails.
    """
    names = []
    for entry_point, plugin in _load(GENERAL_PLUGINS):
        try:
            plugin()
        except Exception as error:  # foreign code, which may raise anything
            raise _bad_plugin(entry_point, f"raised {error!r}") from error
        names.append(entry_point.name)
    return tuple(names)


def load_logits_processors() -> Mapping[str, LogitsProcessorFactory]:
    """Return the installed factories of logits processors by name.

    Raises ValueError that names the plugin, its distribution and the reason if one cannot be
    imported, is no callable or has the name of another.
    """
    factories: dict[str, LogitsProcessorFactory] = {}
    for entry_point, factory in _load(LOGITS_PROCESSORS):
        if entry_point.name in factories:
            raise _bad_plugin(entry_point, "another plugin has the same name")
        factories[entry_point.name] = factory
    return factories


def _load(group: str) -> Iterator[tuple[EntryPoint, Callable[..., Any]]]:
    for entry_point in sorted(entry_points(group=group), key=_sort_key):
        try:
            plugin = entry_point.load()
        except Exception as error:  # importing a module may raise anything
            raise _bad_plugin(entry_point, f"cannot be imported: {error!r}") from error
        if not callable(plugin):
            raise _bad_plugin(entry_point, f"is no callable but {type(plugin).__name__}")
        yield entry_point, plugin


def _sort_key(entry_point: EntryPoint) -> tuple[str, str]:
    return entry_point.name, entry_point.value


def _bad_plugin(entry_point: EntryPoint, reason: str) -> ValueError:
    distribution = entry_point.dist.name if entry_point.dist is not None else "unknown"
    return ValueError(
        f"plugin {entry_point.name} = {entry_point.value} ({entry_point.group}) of distribution "
        f"{distribution}: {reason}"
    )
