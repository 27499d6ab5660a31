"""Public functions that take or return tensors say of which shapes and dtypes."""

import ast
import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
FILES = sorted(ROOT.glob("*/pdserve_*/**/*.py"))
TENSORS = {"Tensor", "ndarray", "NDArray"}
# Such as [num_tokens, hidden_size]; [] is a scalar's.
SHAPE = re.compile(r"(?<![\w\])])\[[^\[\]]*\]")
# "dtype" where it is another tensor's, or the model's.
DTYPE = re.compile(r"\b(bf16|fp(8|16|32|64)|u?int(8|16|32|64)|bool|FP8|dtypes?)\b")

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Found(NamedTuple):
    where: str
    function: Function
    # None of a function of a module.
    owner: ast.ClassDef | None


def names_in(annotation: ast.expr | None) -> Iterator[str]:
    """The names in an annotation, but for those of a callable's arguments and results."""
    match annotation:
        case None:
            return
        case ast.Constant(value=str(quoted)):
            with contextlib.suppress(SyntaxError, ValueError):
                yield from names_in(ast.parse(quoted, mode="eval").body)
        case ast.Subscript(value=ast.Name(id="Callable")):
            return
        case ast.Name(id=name):
            yield name
        case ast.Attribute(attr=name):
            yield name
        case _:
            for child in ast.iter_child_nodes(annotation):
                if isinstance(child, ast.expr):
                    yield from names_in(child)


def module_of(path: Path) -> str:
    """pdserve_engine.kv.kv_cache of engine/pdserve_engine/kv/kv_cache.py."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts[1:]).removesuffix(".__init__")


def tensor_aliases(trees: dict[Path, ast.Module]) -> set[tuple[str, str]]:
    """Modules and the names that they have for tensors."""
    return {
        (module_of(path), target.id)
        for path, tree in trees.items()
        for node in tree.body
        if isinstance(node, ast.Assign) and TENSORS & {*names_in(node.value)}
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def tensor_names(path: Path, tree: ast.Module, aliases: set[tuple[str, str]]) -> set[str]:
    """What tensors are called in a file's annotations."""
    own = {name for module, name in aliases if module == module_of(path)}
    imported = {
        alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if (node.module, alias.name) in aliases
    }
    return TENSORS | own | imported


def functions_of(tree: ast.Module, where: str) -> Iterator[Found]:
    for node in tree.body:
        if isinstance(node, Function):
            yield Found(f"{where}:{node.lineno} {node.name}", node, None)
        elif isinstance(node, ast.ClassDef):
            for child in node.body:
                if isinstance(child, Function):
                    name = f"{node.name}.{child.name}"
                    yield Found(f"{where}:{child.lineno} {name}", child, node)


def bases_of(owner: ast.ClassDef) -> set[str]:
    return {name for base in owner.bases for name in names_in(base)}


def bases_in(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield from bases_of(node)


def takes_tensors(function: Function, names: set[str]) -> bool:
    args = function.args
    given = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
    annotations = [arg.annotation for arg in given if arg is not None]
    return any(names & {*names_in(each)} for each in (*annotations, function.returns))


def is_public(found: Found) -> bool:
    names = [found.function.name] + ([found.owner.name] if found.owner else [])
    return not any(name.startswith("_") for name in names)


def says_shapes(function: Function) -> bool:
    text = ast.get_docstring(function) or ""
    return SHAPE.search(text) is not None and DTYPE.search(text) is not None


def test_functions_of_tensors_say_shapes_and_dtypes() -> None:
    trees = {path: ast.parse(path.read_text()) for path in FILES}
    aliases = tensor_aliases(trees)
    with_tensors = [
        found
        for path, tree in trees.items()
        for found in functions_of(tree, str(path.relative_to(ROOT)))
        if takes_tensors(found.function, tensor_names(path, tree, aliases))
    ]
    # What an interface or a base class says goes for all functions of that name, of a class or of
    # a kernel set.
    bases = {base for tree in trees.values() for base in bases_in(tree)}
    said = {
        each.function.name
        for each in with_tensors
        if each.owner is not None
        and (each.owner.name in bases or "Protocol" in bases_of(each.owner))
        and says_shapes(each.function)
    }
    silent = [
        found.where
        for found in with_tensors
        if is_public(found) and found.function.name not in said and not says_shapes(found.function)
    ]
    assert len(with_tensors) > 200, "the annotations are not found"
    assert not silent, "shapes, such as [num_tokens, hidden_size], or dtypes are missing:\n" + (
        "\n".join(silent)
    )
