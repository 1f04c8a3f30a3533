"""Python's sources as they are written. Nothing is imported: of vLLM's GPU code that takes long, and here it
lacks its kernels.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
from collections.abc import Iterator
from functools import cache
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Written:
    """One file.

    Args:
        text: what is in it.
    """

    def __init__(self, text: str) -> None:
        self._tree = ast.parse(text)

    @property
    def text(self) -> str:
        """All of it in one style, without comments."""
        return ast.unparse(self._tree)

    def names(self) -> set[str]:
        """What it has at its top: functions, classes, what is imported or assigned."""
        found = {alias.asname or alias.name for node in self._imports() for alias in node.names}
        return found | _bound(self._tree.body)

    def members(self, kind: str) -> set[str]:
        """What objects of a class have: its own names, and what its methods assign to `self`."""
        body = self._find(kind).body
        methods = [node for node in body if isinstance(node, Function)]
        assigned = {
            node.attr
            for method in methods
            for node in ast.walk(method)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            if isinstance(node.value, ast.Name) and node.value.id == "self"
        }
        return assigned | _bound(body)

    def fields(self, kind: str) -> list[str]:
        """Those of a data class, in order."""
        body = self._find(kind).body
        return [ast.unparse(node.target) for node in body if isinstance(node, ast.AnnAssign)]

    def value(self, name: str) -> object:
        """What is assigned to a name of the file, or of a class, if it is made of literals."""
        *path, last = name.split(".")
        body = self._find(".".join(path)).body if path else self._tree.body
        for node in body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if any(isinstance(target, ast.Name) and target.id == last for target in targets):
                value = node.value
                return _literal(value.slice if isinstance(value, ast.Subscript) else value)
        raise AssertionError(f"there is no {name}")

    def signature(self, name: str) -> inspect.Signature:
        """Of a function, or of a method, without `self` or the class. Functions within others count too."""
        node = self._find(name)
        assert isinstance(node, Function), f"{name} is a class"
        parameters = list(_parameters(node.args))
        decorators = {ast.unparse(each) for each in node.decorator_list}
        if isinstance(self._find(name.rpartition(".")[0]), ast.ClassDef) and "staticmethod" not in decorators:
            parameters = parameters[1:]
        return inspect.Signature(parameters)

    def calls(self, what: str) -> list[ast.Call]:
        """All calls of what is called so."""
        return [
            node
            for node in ast.walk(self._tree)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == what
        ]

    def taken_of(self, what: str) -> set[str]:
        """The attributes of what is called so that it reads."""
        return {
            node.attr
            for node in ast.walk(self._tree)
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == what
        }

    def strings(self) -> set[str]:
        """All literal strings."""
        return {
            node.value
            for node in ast.walk(self._tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }

    def _imports(self) -> Iterator[ast.Import | ast.ImportFrom]:
        # Those for types alone, or for one kind of device, too.
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                yield node

    def _find(self, name: str) -> ast.Module | ast.ClassDef | Function:
        found: ast.Module | ast.ClassDef | Function = self._tree
        for part in filter(None, name.split(".")):
            inner = [
                node for node in found.body if isinstance(node, ast.ClassDef | Function) and node.name == part
            ]
            assert inner, f"there is no {name}"
            found = inner[-1]
        return found


def fits(call: ast.Call, signature: inspect.Signature) -> bool:
    """Whether a function takes the arguments of a call."""
    if any(isinstance(argument, ast.Starred) for argument in call.args):
        raise AssertionError(f"what {ast.unparse(call)} gives is not known")
    named = {keyword.arg: None for keyword in call.keywords}
    try:
        signature.bind(*call.args, **named)
    except TypeError:
        return False
    return True


@cache
def written(module: str) -> Written:
    """The file of a module."""
    top, _, rest = module.partition(".")
    package = importlib.util.find_spec(top)
    assert package is not None and package.submodule_search_locations
    path = Path(next(iter(package.submodule_search_locations)), *rest.split("."))
    return Written((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())


def _literal(node: ast.expr) -> object:
    if not isinstance(node, ast.Tuple):
        return ast.literal_eval(node)
    found: list[object] = []
    for each in node.elts:
        found += _literal(each.value) if isinstance(each, ast.Starred) else [_literal(each)]
    return tuple(found)


def _bound(body: list[ast.stmt]) -> set[str]:
    found = set()
    for node in body:
        if isinstance(node, ast.ClassDef | Function):
            found.add(node.name)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def _parameters(arguments: ast.arguments) -> Iterator[inspect.Parameter]:
    kind = inspect.Parameter
    placed = [
        *((each.arg, kind.POSITIONAL_ONLY) for each in arguments.posonlyargs),
        *((each.arg, kind.POSITIONAL_OR_KEYWORD) for each in arguments.args),
    ]
    needed = len(placed) - len(arguments.defaults)
    for number, (name, how) in enumerate(placed):
        yield kind(name, how, default=kind.empty if number < needed else None)
    if arguments.vararg:
        yield kind(arguments.vararg.arg, kind.VAR_POSITIONAL)
    for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield kind(each.arg, kind.KEYWORD_ONLY, default=kind.empty if default is None else None)
    if arguments.kwarg:
        yield kind(arguments.kwarg.arg, kind.VAR_KEYWORD)
