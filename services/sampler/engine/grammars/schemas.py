"""What XGrammar would pass over in a JSON Schema without a word. vLLM's own check knows a part of it, and
most of that only beside a `type`.

Its reports: mlc-ai/xgrammar#104 asks for what it reads at all; #968 is of arrays, #966 and #967 of strings,
#958 to #961, #964 and #965 of names of properties, #937 of `allOf`, and #858 of what stands beside `anyOf`,
`oneOf` and `allOf`. Of what is beside `$ref`, `const` and `enum`, of keywords without a type, of names that
are required and not listed, and of names that come twice no report was found.

Invariant: a text that the grammar of a schema admits which passes here is a value that the schema admits, but
for names of properties that are written in escapes, and formats, of which the grammar knows the form alone.
What is not read because it says nothing of the values in question, passes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from services.sampler.engine.grammars.apart import MAX_BRANCHES, Comparison, target
from services.sampler.engine.grammars.patterns import check_pattern, unsupported

_UNREAD = (
    *("multipleOf", "uniqueItems", "contains", "minContains", "maxContains"),
    *("dependentRequired", "dependentSchemas", "dependencies"),
    *("not", "if", "$dynamicRef", "$recursiveRef"),
)
"""Keywords that it never reads, but for a `multipleOf` of integers, which vLLM refuses as well."""

_WHOLE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
"""Keywords of which it reads the first that is there, and nothing beside it."""

_NUMBER = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_OF: dict[str, tuple[str, ...]] = {
    "integer": _NUMBER,
    "number": _NUMBER,
    "string": ("minLength", "maxLength", "pattern", "format"),
    "array": ("items", "prefixItems", "unevaluatedItems", "minItems", "maxItems"),
    "object": (
        *("properties", "required", "additionalProperties", "unevaluatedProperties"),
        *("patternProperties", "propertyNames", "minProperties", "maxProperties"),
    ),
}
"""Keywords that say something of the values of a type."""
_IMPLY = {
    "object": ("properties", "additionalProperties", "unevaluatedProperties"),
    "array": ("items", "prefixItems", "unevaluatedItems"),
}
"""Where no type is given, it takes that of the first of these keywords."""

_FORMATS = (
    *("email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid", "uri"),
    *("uri-reference", "uri-template", "json-pointer", "relative-json-pointer"),
)
_PYTHON: dict[str, tuple[type, ...]] = {
    "null": (type(None),),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "array": (list,),
    "object": (dict,),
}


def check_schema(schema: Any, where: str = "the JSON Schema") -> None:
    """Refuses a schema of which the grammar would admit what it does not. What is no schema at all XGrammar
    refuses itself.

    Args:
        schema: parsed JSON.
        where: it is, for the message.

    Raises:
        InvalidRequest: with what to change.
    """
    _Walk(schema, where).check()


@dataclass(frozen=True)
class _Place:
    """Where a schema is. Put together for a message only: of one with a long name each of thousands in it
    would have that."""

    root: str
    parts: tuple[Any, ...] = ()
    """The parts above it, as such a tuple, and its own."""

    def below(self, *parts: str | int) -> _Place:
        return _Place(self.root, (self.parts, *parts))

    def __str__(self) -> str:
        parts, above = list[str](), self.parts
        while above:
            parts += [str(part) for part in above[:0:-1]]
            above = above[0]
        return "/".join(("#", *reversed(parts))) + f" of {self.root}"


class _Walk:
    def __init__(self, root: Any, where: str) -> None:
        self._root, self._where = root, where
        self._waiting: list[tuple[Any, _Place, str | None]] = [(root, _Place(where), None)]
        self._met: set[str] = set()
        self._comparison = Comparison(root)

    def check(self) -> None:
        # A schema may refer to itself.
        while self._waiting:
            schema, at, default = self._waiting.pop()
            if isinstance(schema, dict):
                self._check(schema, at, default)

    def _check(self, schema: dict[str, Any], at: _Place, default: str | None) -> None:
        for keyword in _UNREAD:
            if keyword in schema:
                raise unsupported(f"{at} has {keyword}, which is not enforced; leave it out")
        if "$id" in schema and at.parts:
            raise unsupported(f"{at} has an $id, and references are read from the root's; leave it out")
        if whole := next((keyword for keyword in _WHOLE if keyword in schema), None):
            self._check_whole(schema, whole, at)
            return
        types = _types(schema, default)
        if not types:
            untyped = _beside(schema, [keyword for of in _OF.values() for keyword in of])
            if untyped:
                raise unsupported(f"{at} has {untyped[0]} without a type, and so it is not enforced; add one")
        if "string" in types:
            _check_string(schema, at)
        if "object" in types:
            _check_object(schema, at)
        for of in types:
            self._waiting += _within(schema, of, at)

    def _check_whole(self, schema: dict[str, Any], whole: str, at: _Place) -> None:
        others = {keyword for of in _OF.values() for keyword in of} | {*_WHOLE, "type"}
        if beside := _beside(schema, others - {whole}):
            values = [schema["const"]] if whole == "const" else schema[whole]
            if (
                whole not in ("const", "enum")
                or beside != ["type"]
                or not _all_of(values, _types(schema, None))
            ):
                raise unsupported(
                    f"{at} has {beside[0]} beside {whole}, where it is not enforced; say both in one of "
                    "them, or leave one out"
                )
        if whole == "$ref":
            self._follow(schema["$ref"], at)
        if whole not in ("anyOf", "oneOf", "allOf") or not isinstance(schema[whole], list):
            return
        branches = schema[whole]
        if whole == "allOf" and len(branches) > 1:
            raise unsupported(
                f"{at} has an allOf of {len(branches)}, which is not enforced; make them one schema"
            )
        if whole == "oneOf" and not self._comparison.all_apart(branches):
            raise unsupported(
                f"{at} has a oneOf, and that no value is of two of its branches is enforced only of up to "
                f"{MAX_BRANCHES} that differ in type, const, or the const of a property that all require; "
                "use anyOf"
            )
        self._waiting += [(branch, at.below(whole, i), None) for i, branch in enumerate(branches)]

    def _follow(self, reference: Any, at: _Place) -> None:
        if not isinstance(reference, str) or reference in self._met:
            return
        if reference != "#" and not reference.startswith("#/"):
            raise unsupported(f"{at} has the $ref {reference}, and only those that begin with #/ are read")
        self._met.add(reference)
        place = _Place(self._where, ((), reference[2:]) if reference != "#" else ())
        self._waiting.append((target(self._root, reference), place, None))


def _beside(schema: Mapping[str, Any], keywords: Any) -> list[str]:
    return sorted(keyword for keyword in schema if keyword in keywords)


def _types(schema: Mapping[str, Any], default: str | None) -> list[str]:
    """The types whose values XGrammar has a schema admit; none: any value."""
    given = schema.get("type", default)
    if isinstance(given, list):
        return [of for of in given if isinstance(of, str)]
    if isinstance(given, str):
        return [given]
    return [of for of, keywords in _IMPLY.items() if _beside(schema, keywords)][:1]


def _all_of(values: Any, types: list[str]) -> bool:
    def fits(value: Any, of: str) -> bool:
        if isinstance(value, bool) and of != "boolean":
            return False
        return isinstance(value, _PYTHON.get(of, ()))

    return isinstance(values, list) and all(any(fits(value, of) for of in types) for value in values)


def _check_string(schema: Mapping[str, Any], at: _Place) -> None:
    read = _beside(schema, _OF["string"])
    if ("format" in read or "pattern" in read) and len(read) > 1:
        raise unsupported(f"{at} has {read[0]} beside {read[1]}, and one of them is enforced; leave one out")
    if "format" in read and schema["format"] not in _FORMATS:
        raise unsupported(
            f"{at} has the format {schema['format']!r}, which is not enforced; leave it out, or use one of "
            f"{', '.join(_FORMATS)}"
        )
    if isinstance(pattern := schema.get("pattern"), str):
        check_pattern(pattern, f"the pattern at {at}")


def _check_object(schema: Mapping[str, Any], at: _Place) -> None:
    named = schema.get("properties", {})
    required = schema.get("required", [])
    if isinstance(named, dict) and isinstance(required, list):
        for name in required:
            if name not in named:
                raise unsupported(
                    f"{at} requires {name!r}, which is not enforced unless properties have it; add it"
                )
    patterns, names = schema.get("patternProperties"), "propertyNames" in schema
    if patterns is not None and ("properties" in schema or names or len(patterns) > 1):
        raise unsupported(
            f"{at} has patternProperties, of which one is enforced, and none beside properties or "
            "propertyNames; leave one out"
        )
    rest = [schema.get(word, True) for word in ("additionalProperties", "unevaluatedProperties")]
    if names and ("properties" in schema or False in rest or rest[1] is not True):
        raise unsupported(
            f"{at} has propertyNames, which are not enforced beside properties, unevaluatedProperties and an "
            "additionalProperties that is false; leave one out"
        )
    for pattern in patterns or ():
        check_pattern(pattern, f"a name in patternProperties at {at}")
    least = schema.get("minProperties", 0)
    if isinstance(least, int) and least > 1 and (patterns or names or _open(schema)):
        raise unsupported(
            f"{at} has minProperties {least} where names may be any, of which one may come twice; list the "
            "properties, or leave it out"
        )


def _open(schema: Mapping[str, Any]) -> bool:
    """Whether an object may have properties that are not listed. Where nothing is said it has none."""
    given = schema.get("additionalProperties", schema.get("unevaluatedProperties", False))
    return given is not False


def _within(schema: Mapping[str, Any], of: str, at: _Place) -> Iterator[tuple[Any, _Place, str | None]]:
    """The schemas in a schema of a type, as XGrammar reads them: where they are, and the type that they have
    where they give none."""
    if of == "object":
        for word in ("properties", "patternProperties"):
            if isinstance(schema.get(word), dict):
                yield from ((each, at.below(word, name), None) for name, each in schema[word].items())
        for word in ("additionalProperties", "unevaluatedProperties"):
            yield schema.get(word), at.below(word), None
        yield schema.get("propertyNames"), at.below("propertyNames"), "string"
    if of == "array":
        if isinstance(schema.get("prefixItems"), list):
            yield from (
                (each, at.below("prefixItems", i), None) for i, each in enumerate(schema["prefixItems"])
            )
        for word in ("items", "unevaluatedItems"):
            yield schema.get(word), at.below(word), None
