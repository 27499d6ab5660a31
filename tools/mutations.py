"""Changes of one place of Python code, such as a defect would be."""

import ast
import copy
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

OTHER_OPERATOR: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
}
OTHER_NAME = {"min": "max", "max": "min", "any": "all", "all": "any"}
# What no behaviour hangs on, or only a text for people.
LEFT_OUT_NODES = (ast.Assert, ast.Raise, ast.JoinedStr)
LEFT_OUT_FIELDS = {"annotation", "returns", "decorator_list", "defaults", "kw_defaults"}
LEFT_OUT_FUNCTIONS = {"__repr__", "__str__"}
LOGS = {"logger", "logging", "log_request"}


class Change(NamedTuple):
    """A change of a file: what stands where, and what is to stand there.

    It is found again after the file has changed elsewhere: `nth` counts, from 0 on, the places of a
    function (`where`) at which the same is changed into the same.
    """

    where: str
    kind: str
    before: str
    after: str
    nth: int


class Site(NamedTuple):
    """A change, and the lines of the statement that it is in: the first one and the last one."""

    change: Change
    line: int
    lines: tuple[int, int]


def sites(source: str) -> list[Site]:
    """Return all changes of a file, in their order in it."""
    return [site for site, _ in _walk(ast.parse(source))]


def apply(source: str, change: Change) -> str | None:
    """Return the file with the change, and without its comments; None if it has no such place."""
    tree = ast.parse(source)
    for site, put in _walk(tree):
        if site.change == change:
            put()
            return ast.unparse(ast.fix_missing_locations(tree)) + "\n"
    return None


def _walk(tree: ast.Module) -> Iterator[tuple[Site, Callable[[], None]]]:
    counts: Counter[tuple[str, ...]] = Counter()
    for where, statement, node, kind, new, put in _places(tree, (), None):
        key = (where, kind, _text(node), _text(new))
        change = Change(where, kind, key[2], key[3], counts[key])
        counts[key] += 1
        line = getattr(node, "lineno", statement.lineno)
        yield Site(change, line, _lines(statement)), functools.partial(put, new)


def _places(
    parent: ast.AST, names: tuple[str, ...], statement: ast.stmt | None
) -> Iterator[tuple[str, ast.stmt, ast.AST, str, ast.AST, Callable[[ast.AST], None]]]:
    """Yield what can be changed within a node; `statement` is None outside of functions."""
    for field, value in list(ast.iter_fields(parent)):
        if field in LEFT_OUT_FIELDS:
            continue
        children = value if isinstance(value, list) else [value]
        for number, node in enumerate(list(children)):
            if not isinstance(node, ast.AST) or _is_left_out(node):
                continue

            put = functools.partial(_put, parent, field, number)
            inner, within = names, statement
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                inner = (*names, node.name)
                within = None if isinstance(node, ast.ClassDef) else node
            elif statement is not None:
                within = node if isinstance(node, ast.stmt) else statement
                for kind, new in _changes(node, names[-1]):
                    yield ".".join(names), within, node, kind, new, put
            yield from _places(node, inner, within)


def _put(parent: ast.AST, field: str, number: int, new: ast.AST) -> None:
    if isinstance(getattr(parent, field), list):
        getattr(parent, field)[number] = new
    else:
        setattr(parent, field, new)


def _is_left_out(node: ast.AST) -> bool:
    match node:
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.Expr(value=ast.Call(func=func)):
            return ast.unparse(func).split(".")[0] in LOGS
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.FunctionDef(name=name):
            return name in LEFT_OUT_FUNCTIONS
    return isinstance(node, LEFT_OUT_NODES)


def _changes(node: ast.AST, function: str) -> Iterator[tuple[str, ast.AST]]:
    """Yield what can stand in a node's place, each with the name of its kind."""
    match node:
        case ast.Compare(ops=[op]):
            yield "compare", _with(node, ops=[OTHER_OPERATOR[type(op)]()])
        case ast.BoolOp(op=op):
            yield "and/or", _with(node, op=OTHER_OPERATOR[type(op)]())
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "not", operand
        case ast.BinOp(op=ast.Add() | ast.Sub() as op) if not _is_text(node):
            yield "+/-", _with(node, op=OTHER_OPERATOR[type(op)]())
        case ast.AugAssign(op=ast.Add() | ast.Sub() as op) if not _is_text(node):
            yield "+/-", _with(node, op=OTHER_OPERATOR[type(op)]())
        case ast.Constant(value=bool(value)):
            yield "constant", ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield "constant", ast.Constant(value + 1)
        case ast.Call(func=ast.Name(id=name)) if name in OTHER_NAME:
            yield "min/max", _with(node, func=ast.Name(OTHER_NAME[name]))
        case ast.IfExp(body=body, orelse=orelse):
            yield "if", body
            yield "if", orelse
        case ast.If():
            yield "if", _with(node, test=ast.Constant(True))
            yield "if", _with(node, test=ast.Constant(False))
        case ast.While(test=test) if not isinstance(test, ast.Constant):
            yield "while", _with(node, test=ast.Constant(False))
        case ast.comprehension(ifs=[_, *_]):
            yield "filter", _with(node, ifs=[])
        # Of True and False None is no more than the other one.
        case ast.Return(value=ast.expr() as value) if not _is_single(value):
            yield "return", ast.Return(ast.Constant(None))
        case ast.Break():
            yield "break", ast.Continue()
        case ast.Continue():
            yield "break", ast.Break()
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.Delete():
            yield "statement", ast.Pass()
        case ast.Assign(targets=[ast.Attribute()]) if function != "__init__":
            yield "statement", ast.Pass()


def _with(node: ast.AST, **fields: object) -> ast.AST:
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new


def _is_text(node: ast.BinOp | ast.AugAssign) -> bool:
    operands = [node.left, node.right] if isinstance(node, ast.BinOp) else [node.value]
    return any(
        isinstance(each, ast.JoinedStr)
        or (isinstance(each, ast.Constant) and isinstance(each.value, str | bytes))
        for each in operands
    )


def _is_single(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, bool))


def _text(node: ast.AST) -> str:
    """Return a line of code that says what stands there; of a compound statement its head."""
    return ast.unparse(ast.fix_missing_locations(copy.copy(node))).strip().splitlines()[0]


def _lines(statement: ast.stmt) -> tuple[int, int]:
    body = getattr(statement, "body", None)
    last = body[0].lineno - 1 if body else statement.end_lineno or statement.lineno
    return statement.lineno, max(statement.lineno, last)
