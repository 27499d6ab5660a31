"""Has each call that a function makes raise, one at a time: what becomes of those behind it?"""

import ast
import builtins
import functools
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest

from support.samples import sampled

_RAISE = "_raise_at_site"
# Their work is to contain what others raise.
_TRUSTED = ("defects.", "logger.", "isinstance(", "super(", "rpc_errors(")


class UnexpectedError(Exception):
    """Nothing of ours raises or expects it."""


@dataclass(frozen=True)
class CallSite:
    """A call in the source of a method or of a module's function, by its number there."""

    owner: type | ModuleType
    method: str
    number: int
    text: str

    def __str__(self) -> str:
        return f"{self.owner.__name__.rpartition('.')[2]}.{self.method}:{self.number}:{self.text}"


class _Numbering(ast.NodeTransformer):
    """Passes what is called, with the call's number, through `_RAISE`."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def visit_Call(self, node: ast.Call) -> ast.AST:
        text = ast.unparse(node.func)
        is_trusted = f"{text}(".startswith(_TRUSTED) or hasattr(builtins, text)
        self.generic_visit(node)
        if not is_trusted:
            name = ast.Name(_RAISE, ast.Load())
            number = ast.Constant(len(self.texts))
            self.texts.append(text)
            node.func = ast.Call(name, [number, node.func], [])
        return node


def _numbered(function: Any) -> tuple[ast.Module, list[str]]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    (definition,) = tree.body
    assert isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef)
    definition.decorator_list, definition.returns = [], None
    for argument in (*definition.args.args, *definition.args.kwonlyargs):
        argument.annotation = None
    numbering = _Numbering()
    definition.body = [numbering.visit(statement) for statement in definition.body]
    return ast.fix_missing_locations(tree), numbering.texts


def call_sites(owner: type | ModuleType, *methods: str) -> list[CallSite]:
    """Return the calls that these methods or functions make, but for builtins and what contains
    defects.
    """
    return [
        CallSite(owner, method, number, text)
        for method in methods
        for number, text in enumerate(_numbered(inspect.getattr_static(owner, method))[1])
    ]


class Fault:
    """What was made to raise; it does so once."""

    def __init__(self, site: CallSite) -> None:
        self.site = site
        self.has_raised = False

    def __call__(self, number: int, called: Any) -> Any:
        # What is written in C has no defects of ours: deques, locks, events.
        if number != self.site.number or self.has_raised or inspect.isbuiltin(called):
            return called
        self.has_raised = True
        raise UnexpectedError(str(self.site))


@contextmanager
def fault_at(site: CallSite) -> Iterator[Fault]:
    """Have a call raise UnexpectedError the first time that it is about to be made."""
    function = inspect.getattr_static(site.owner, site.method)
    tree, _ = _numbered(function)
    fault = Fault(site)
    names: dict[str, Any] = {}
    # Its own globals, as tests may patch them meanwhile.
    scope = function.__globals__
    scope[_RAISE] = fault
    exec(compile(tree, inspect.getsourcefile(function) or "?", "exec"), scope, names)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(site.owner, site.method, functools.wraps(function)(names[site.method]))
        try:
            yield fault
        finally:
            del scope[_RAISE]


def each_site(sites: Sequence[CallSite], *kept: str) -> Any:
    """Parametrize a test with `site`. If there are methods that are `kept`, the sites of others are
    marked `soak`.
    """
    methods = kept or [site.method for site in sites]
    cases = sampled(sites, *(site for site in sites if site.method in methods))
    return pytest.mark.parametrize("site", cases, ids=str)
