"""What the grammar of a schema would admit and the schema does not is refused."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import torch
import xgrammar
from xgrammar.testing import _is_grammar_accept_string as admits

from services.common.contract.errors import InvalidRequest
from services.sampler.engine.grammars import apart
from services.sampler.engine.grammars.schemas import check_schema

WORD = {"type": "string", "pattern": "^[a-z]{1,3}$"}
CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "age": {"type": "integer"}}}
DOG = {"type": "object", "properties": {"kind": {"const": "dog"}, "name": WORD}}


def of(kind: str, **keywords: Any) -> dict[str, Any]:
    return {"type": kind, **keywords}


def requiring(schema: dict[str, Any], *names: str) -> dict[str, Any]:
    return {**schema, "required": list(names)}


PASSED_OVER: list[tuple[Any, str, str]] = [
    # A schema, a text that XGrammar admits all the same, and what the refusal names.
    (of("number", multipleOf=3), "4", "multipleOf"),
    ({"multipleOf": 3}, "4", "multipleOf"),
    ({"uniqueItems": True}, "[1, 1]", "uniqueItems"),
    (of("array", items={}, uniqueItems=True), "[1, 1]", "uniqueItems"),
    ({"contains": {"type": "string"}}, "[1]", "contains"),
    ({"not": {"type": "integer"}}, "1", "not"),
    ({"if": {"type": "integer"}, "then": {"minimum": 3}}, "1", "if"),
    (of("object", properties={"a": {}, "b": {}}, dependentRequired={"a": ["b"]}), '{"a": 1}', "dependentReq"),
    ({"dependentSchemas": {"a": {"required": ["b"]}}}, '{"a": 1}', "dependentSchemas"),
    ({"$dynamicRef": "#a", "$defs": {"a": {"$dynamicAnchor": "a", "type": "null"}}}, "1", "dynamicRef"),
    (of("object", properties={"a": {}, "b": {}}, dependencies={"a": ["b"]}), '{"a": 1}', "dependencies"),
    ({"allOf": [{"type": "string"}, {"enum": ["a"]}]}, "1", "allOf of 2"),
    ({"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 3}]}, "4", "oneOf"),
    (of("integer", anyOf=[{"minimum": 3}, {"maximum": 1}]), '"x"', "type beside anyOf"),
    (requiring({**CAT, "anyOf": [{"required": ["a"]}]}, "kind"), '{"b": 1}', "properties beside anyOf"),
    ({"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": {"type": "integer"}}}, "1", "minimum beside .ref"),
    (of("integer", minimum=3, allOf=[{"type": "integer"}]), "1", "minimum beside allOf"),
    (of("string", enum=[1, "a"]), "1", "type beside enum"),
    (of("string", const=1), "1", "type beside const"),
    (of("boolean", enum=[1, True]), "1", "type beside enum"),
    ({"enum": ["aa", "b"], "maxLength": 1}, '"aa"', "maxLength beside enum"),
    ({"minimum": 3}, "1", "minimum without a type"),
    ({"pattern": "^a$"}, '"b"', "pattern without a type"),
    ({"required": ["a"]}, "{}", "required without a type"),
    ({"patternProperties": {"^a": {"type": "integer"}}}, '{"a": "x"}', "patternProperties without a type"),
    ({"$ref": "#a", "$defs": {"a": {"$anchor": "a", "type": "integer"}}}, '"x"', "the .ref #a"),
    (of("string", format="regex"), '"("', "format 'regex'"),
    (of("string", pattern="^a*$", minLength=3), '"a"', "minLength beside pattern"),
    (of("string", pattern="^2.*$", format="date"), '"1999-01-01"', "format beside pattern"),
    (of("object", required=["a"]), "{}", "requires 'a'"),
    (requiring(of("object", additionalProperties=True), "a"), '{"b": 1}', "requires 'a'"),
    (of("object", propertyNames={"enum": ["a"]}, additionalProperties=False), '{"a": 1}', "propertyNames"),
    (of("object", propertyNames={"maxLength": 1}, properties={"ab": {}}), '{"ab": 1}', "propertyNames"),
    (
        of("object", properties={"a": {}}, patternProperties={"^a$": {"type": "null"}}),
        *('{"a": 1}', "patternProperties"),
    ),
    (
        of("object", patternProperties={"^a.*$": {"type": "integer"}, "^.*a$": {"type": "null"}}),
        *('{"aa": 1}', "patternProperties"),
    ),
    (of("object", additionalProperties=True, minProperties=2), '{"a": 1, "a": 2}', "minProperties"),
    (of("string", pattern="^a$b"), '"ab"', "anchor"),
]


@pytest.mark.parametrize(("schema", "text", "named"), PASSED_OVER)
def test_what_a_grammar_would_pass_over_is_refused_wherever_it_stands(
    schema: Any, text: str, named: str
) -> None:
    assert admits(xgrammar.Grammar.from_json_schema(json.dumps(schema)), text)
    moved = json.loads(json.dumps(schema).replace("#/$defs/", "#/properties/p/$defs/"))
    for whole in (
        schema,
        of("object", properties={"p": moved}),
        {"items": {"anyOf": [moved]}, "properties": {"p": moved}},
        {"$ref": "#/$defs/d/prefixItems", "$defs": {"d": {"prefixItems": moved}}},
    ):
        with pytest.raises(InvalidRequest, match=named) as refused:
            check_schema(whole)
        assert refused.value.code == "constraint_unsupported"


ENFORCED: list[Any] = [
    True,
    {},
    {"type": "object"},
    requiring({**CAT, "additionalProperties": False}, "kind"),
    {**requiring(CAT, "kind"), "$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Cat"},
    of("object", properties={"a": WORD, "b": of("integer")}, minProperties=1),
    of(
        "object", properties={"a": of("integer")}, additionalProperties=WORD, minProperties=1, maxProperties=2
    ),
    of("object", propertyNames=WORD, additionalProperties={"type": "boolean"}),
    of("object", patternProperties={"^[ab]$": {"type": "integer"}}),
    {"properties": {"a": {"type": "null"}}, "minLength": 3},
    of("array", items=of("integer", minimum=-20, exclusiveMaximum=7), minItems=1, maxItems=3),
    of("array", prefixItems=[WORD, {"type": "boolean"}], items=False),
    {"items": {"enum": ["a", 1, None]}},
    of("number", minimum=0.5, maximum=12),
    of("string", minLength=1, maxLength=3),
    of("string", format="date"),
    of("string", enum=["a", "b"]),
    {"type": ["integer", "null"], "minimum": 3},
    {"anyOf": [{"type": "integer", "maximum": 9}, {"type": "null"}], "default": None},
    {"allOf": [{"$ref": "#/$defs/word"}], "description": "x", "$defs": {"word": WORD}},
    {"oneOf": [requiring(CAT, "kind"), {"$ref": "#/$defs/dog"}], "$defs": {"dog": requiring(DOG, "kind")}},
    {"oneOf": [{"type": "string", "maxLength": 2}, {"type": "integer"}, {"const": True}]},
    {
        "$ref": "#/$defs/tree",
        "$defs": {
            "tree": of("object", properties={"left": {"$ref": "#/$defs/tree"}}, additionalProperties=False)
        },
    },
]


def written(schema: Any, seed: int, most: int = 400) -> str | None:
    """A text of the schema's grammar, drawn character by character; None: it is not over after so many."""
    letters = [chr(code) for code in range(32, 127)]
    info = xgrammar.TokenizerInfo([*letters, "<end>"], stop_token_ids=[len(letters)])
    grammar = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(schema), any_whitespace=False)
    matcher, drawn = xgrammar.GrammarMatcher(grammar), random.Random(seed)
    mask, text = xgrammar.allocate_token_bitmask(1, info.vocab_size), ""
    for _ in range(most):
        matcher.fill_next_token_bitmask(mask)
        bits = mask[0, torch.arange(info.vocab_size) // 32] >> (torch.arange(info.vocab_size) % 32) & 1
        allowed = bits.nonzero()[:, 0].tolist()
        # What ends a string, a list, an object or the text comes soon.
        ends = [token for token in allowed if token == len(letters) or letters[token] in '"]}']
        token = drawn.choice(ends if ends and drawn.random() < 0.4 else allowed)
        if token == len(letters):
            return text
        assert matcher.accept_token(token)
        text += letters[token]
    return None


@pytest.mark.parametrize("schema", ENFORCED)
def test_what_the_grammar_of_a_schema_that_passes_admits_the_schema_admits(schema: Any) -> None:
    check_schema(schema)
    texts = [text for seed in range(12) if (text := written(schema, seed)) is not None]
    assert texts
    for text in texts:
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))


@pytest.mark.parametrize(
    "branches",
    [
        [CAT, DOG],
        [requiring(CAT, "kind"), requiring(CAT, "kind")],
        [{"type": "integer"}, {"type": "number"}],
        [{"const": 1}, {"const": 1.0}],
        [{"const": [1]}, {"const": [2]}],
        [{}, {"type": "string"}],
        [{"$ref": "#"}, {"type": "string"}],
        [{"const": number} for number in range(65)],
    ],
)
def test_a_value_may_be_of_two_branches_unless_they_surely_differ(branches: list[Any]) -> None:
    with pytest.raises(InvalidRequest, match="use anyOf"):
        check_schema({"oneOf": branches})


def recursive(names: list[str], reference: str) -> dict[str, Any]:
    """An object that requires so many of what a reference names."""
    properties = {name: {"$ref": reference} for name in names}
    return {"type": "object", "properties": properties, "required": names}


def test_two_schemas_that_refer_to_themselves_in_many_places_are_compared_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared = []
    own = apart._listed

    def listed(schema: Any, keyword: str) -> list[str]:
        compared.append(schema)
        return own(schema, keyword)

    monkeypatch.setattr(apart, "_listed", listed)
    names = [f"p{number}" for number in range(40)]
    one, other = (recursive(names, f"#/$defs/{name}") for name in ("one", "other"))
    branches = [{"$ref": "#/$defs/one"}, {"$ref": "#/$defs/other"}]
    schema = {"anyOf": [{"oneOf": branches}] * 30, "$defs": {"one": one, "other": other}}
    with pytest.raises(InvalidRequest, match="use anyOf"):
        check_schema(schema)
    # Of each depth once.
    assert len(compared) == 8


@pytest.mark.parametrize(
    "branches",
    [
        [{"enum": [f"{number}-{value}" for value in range(20)]} for number in range(9)],
        [
            requiring(of("object", properties={"name": WORD, "kind": {"const": number}}), "name", "kind")
            for number in range(9)
        ],
    ],
    ids=["values", "properties"],
)
def test_so_much_is_compared_and_no_more(branches: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    check_schema({"oneOf": branches})
    monkeypatch.setattr(apart, "_MOST", 100)
    with pytest.raises(InvalidRequest, match="use anyOf"):
        check_schema({"oneOf": branches})


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"multipleOf": 2}, "# of the JSON Schema has multipleOf"),
        (
            of("object", properties={"a/b": {"anyOf": [{}, of("array", prefixItems=[{}, {"not": {}}])]}}),
            "#/properties/a/b/anyOf/1/prefixItems/1 of the JSON Schema has not",
        ),
        (
            {"$ref": "#/$defs/x", "$defs": {"x": of("array", items={"if": {}})}},
            "#/$defs/x/items of the JSON Schema has if",
        ),
    ],
    ids=["the root", "a path", "a reference"],
)
def test_it_says_where_what_is_not_enforced_stands(schema: Any, place: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(place)):
        check_schema(schema)


def test_what_says_nothing_of_the_values_in_question_passes() -> None:
    check_schema(
        {"$defs": {"unused": {"multipleOf": 2}}, "type": "string", "minimum": 3, "then": {"const": 1}}
    )
    check_schema(of("object", properties={"multipleOf": {"type": "integer"}, "not": {"enum": [{"not": 1}]}}))
    check_schema(of("integer", format="int32", examples=[{"if": 1}]))
