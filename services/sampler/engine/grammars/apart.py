"""Whether the branches of a `oneOf` can have no value in common: else XGrammar takes it for an `anyOf`, and
says so in its log alone (mlc-ai/xgrammar#672 was to have it refuse such a one). Pure.

Cost: what is compared is counted, and two schemas are compared once, so a small schema that refers to itself
in many places takes no longer than a large one.
"""

from __future__ import annotations

import itertools
from typing import Any

MAX_BRANCHES = 64
_DEPTH = 4
_MOST = 1_000_000
"""Schemas, names and values that are looked at."""


class Comparison:
    """Compares schemas, until so much has been looked at that it is sure of nothing any more.

    Args:
        root: the schema that they and references in them are of.
    """

    def __init__(self, root: Any) -> None:
        self._root, self._left = root, _MOST
        self._targets: dict[str, Any] = {}
        self._found: dict[tuple[int, int, int], bool] = {}
        self._told: dict[int, tuple[frozenset[str], frozenset[tuple[str, Any]] | None]] = {}

    def all_apart(self, branches: list[Any]) -> bool:
        """Whether it is sure that no value is of two of them."""
        return len(branches) <= MAX_BRANCHES and all(
            self._are_apart(one, other, _DEPTH) for one, other in itertools.combinations(branches, 2)
        )

    def _are_apart(self, one: Any, other: Any, depth: int) -> bool:
        one, other = self._resolved(one), self._resolved(other)
        if depth == 0 or self._left <= 0 or not isinstance(one, dict) or not isinstance(other, dict):
            return False
        # They stay where they are while their root is looked at.
        pair = id(one), id(other), depth
        if pair not in self._found:
            self._found[pair] = self._compare(one, other, depth)
        return self._found[pair]

    def _compare(self, one: dict[str, Any], other: dict[str, Any], depth: int) -> bool:
        (kinds, values), (other_kinds, other_values) = self._about(one), self._about(other)
        self._left -= 1 + min(len(values or ()), len(other_values or ()))
        if kinds and other_kinds and not kinds & other_kinds:
            return True
        if values is not None and other_values is not None and not values & other_values:
            return True
        if not kinds == other_kinds == {"object"}:
            return False
        mine, its = one.get("properties"), other.get("properties")
        if not isinstance(mine, dict) or not isinstance(its, dict):
            return False
        required = _listed(one, "required"), _listed(other, "required")
        self._left -= len(required[0]) + len(required[1])
        names = sorted(set(required[0]) & set(required[1]))
        return any(self._are_apart(mine.get(name), its.get(name), depth - 1) for name in names)

    def _resolved(self, schema: Any) -> Any:
        for _ in range(_DEPTH):
            if not isinstance(schema, dict) or not isinstance(reference := schema.get("$ref"), str):
                return schema
            if reference not in self._targets:
                self._left -= reference.count("/")
                self._targets[reference] = target(self._root, reference)
            schema = self._targets[reference]
        return None

    def _about(self, schema: dict[str, Any]) -> tuple[frozenset[str], frozenset[tuple[str, Any]] | None]:
        """The types of its values, as far as it says so, and those that it names, if they can be compared."""
        if id(schema) not in self._told:
            values = _values(schema)
            self._left -= len(values or ())
            self._told[id(schema)] = _kinds(schema, values), None if values is None else frozenset(values)
        return self._told[id(schema)]


def _listed(schema: dict[str, Any], keyword: str) -> list[str]:
    found = schema.get(keyword)
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []


def _values(schema: dict[str, Any]) -> list[tuple[str, Any]] | None:
    """Those that it names, if they can be compared; numbers are equal however they are written."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or any(isinstance(value, list | dict) for value in values):
        return None
    return [(_kind_of(value), value) for value in values]


def _kinds(schema: dict[str, Any], values: list[tuple[str, Any]] | None) -> frozenset[str]:
    """Integers are numbers."""
    if values is not None:
        return frozenset(kind for kind, _ in values)
    given = schema.get("type")
    types = [given] if isinstance(given, str) else given if isinstance(given, list) else []
    return frozenset("number" if of == "integer" else of for of in types if isinstance(of, str))


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
