"""Whether the branches of a `oneOf` can have no value in common: XGrammar takes it for an `anyOf`. Pure."""

from __future__ import annotations

import itertools
from typing import Any

MAX_BRANCHES = 64
_DEPTH = 4


def all_apart(branches: list[Any], root: Any) -> bool:
    """Whether it is sure that no value is of two of them.

    Args:
        root: the schema that references in them are of.
    """
    if len(branches) > MAX_BRANCHES:
        return False
    return all(_apart(one, other, root, _DEPTH) for one, other in itertools.combinations(branches, 2))


def _apart(one: Any, other: Any, root: Any, depth: int) -> bool:
    one, other = _resolved(one, root), _resolved(other, root)
    if depth == 0 or not isinstance(one, dict) or not isinstance(other, dict):
        return False
    kinds = _kinds(one), _kinds(other)
    if all(kinds) and not kinds[0] & kinds[1]:
        return True
    values = _values(one), _values(other)
    if None not in values and not set(values[0] or ()) & set(values[1] or ()):
        return True
    if kinds != ({"object"}, {"object"}):
        return False
    names = set(_listed(one, "required")) & set(_listed(other, "required"))
    inner = [(one.get("properties"), other.get("properties"))]
    return any(
        _apart(mine.get(name), its.get(name), root, depth - 1)
        for mine, its in inner
        if isinstance(mine, dict) and isinstance(its, dict)
        for name in names
    )


def _resolved(schema: Any, root: Any) -> Any:
    for _ in range(_DEPTH):
        if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
            return schema
        schema = target(root, schema["$ref"])
    return None


def _listed(schema: dict[str, Any], keyword: str) -> list[str]:
    found = schema.get(keyword)
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []


def _values(schema: dict[str, Any]) -> tuple[tuple[str, Any], ...] | None:
    """Those that it names, if they can be compared; numbers are equal however they are written."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or any(isinstance(value, list | dict) for value in values):
        return None
    return tuple((_kind_of(value), value) for value in values)


def _kinds(schema: dict[str, Any]) -> set[str]:
    """The types of its values, as far as it says so; integers are numbers."""
    if (values := _values(schema)) is not None:
        return {kind for kind, _ in values}
    given = schema.get("type")
    types = [given] if isinstance(given, str) else given if isinstance(given, list) else []
    return {"number" if of == "integer" else of for of in types if isinstance(of, str)}


def _kind_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    return "string" if isinstance(value, str) else "number"


def target(root: Any, reference: str) -> Any:
    """What a reference within a schema names; None: nothing, which XGrammar says itself."""
    found = root
    for part in reference.split("/")[1:]:
        found = found.get(part) if isinstance(found, dict) else None
    return found
