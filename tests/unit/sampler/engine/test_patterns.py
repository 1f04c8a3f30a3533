"""What a grammar would not read in a regular expression is refused."""

from __future__ import annotations

import re

import pytest
import xgrammar
from xgrammar.testing import _is_grammar_accept_string as admits

from services.common.contract.errors import InvalidRequest
from services.sampler.engine.grammars.patterns import check_pattern


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("a$b", "ab"),
        ("a^b", "ab"),
        ("(a$)b", "ab"),
        ("a(^b|c)", "ab"),
        ("(a|b$)c", "bc"),
        ("(a$|b)c", "ac"),
        (r"a\Z", "aZ"),
        (r"[\h]", "h"),
        (r"\Aa", "Aa"),
        ("[[:alpha:]]", ":]"),
        ("[^[:alpha:]]", "x]"),
    ],
)
def test_what_a_grammar_would_read_otherwise_is_refused(pattern: str, text: str) -> None:
    assert admits(xgrammar.Grammar.from_regex(pattern), text)
    with pytest.raises(InvalidRequest, match="the regex has") as refused:
        check_pattern(pattern, "the regex")
    assert refused.value.code == "constraint_unsupported"


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("^a$", "a"),
        ("^a|b$", "b"),
        ("^a$|^b$", "b"),
        ("^(a|b)$", "a"),
        ("(^a|^b$)", "b"),
        (r"(?:^\$a)\^", "$a^"),
        ("[^$][$^]", "a$"),
        (r"a\|b|c\(\d\D\w\W\s\S\n\t\x41\u0041", "a|b"),
        (r"(?<name>a)+b{2,3}?", "abb"),
        ("", ""),
        ("(a|b)", "b"),
    ],
)
def test_an_expression_that_is_read_as_it_is_passes(pattern: str, text: str) -> None:
    check_pattern(pattern, "the regex")
    assert admits(xgrammar.Grammar.from_regex(pattern), text)
    assert re.fullmatch(pattern.replace("(?<", "(?P<"), text)
