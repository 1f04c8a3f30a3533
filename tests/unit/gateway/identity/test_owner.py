"""Which owner a subject of an identity provider is, and which names are none."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.contract.errors import InvalidRequest
from services.gateway.identity import owner
from services.gateway.identity.key import Rights

SUBJECTS = st.one_of(
    st.text(min_size=1, max_size=200),
    # What could be taken for another one's name.
    st.text(st.sampled_from("ab%~|/: 7C\u00e9\ud800"), min_size=1, max_size=80),
)


@settings(deadline=None, max_examples=50)
@given(SUBJECTS)
def test_a_subject_is_an_owner_whom_no_key_can_name(subject: str) -> None:
    name = owner.of_subject(subject)
    assert owner.named(name) == name
    assert len(name) <= 64 and name.isascii() and not set(name) & set(" :/|{}\n")
    with pytest.raises(InvalidRequest):
        Rights(name).check()


@settings(deadline=None, max_examples=50)
@given(SUBJECTS, SUBJECTS)
def test_two_subjects_are_two_owners(one: str, other: str) -> None:
    assert (owner.of_subject(one) == owner.of_subject(other)) == (one == other)


@pytest.mark.parametrize(
    ("subject", "name"),
    [
        ("alice", "oidc~alice"),
        ("auth0|5f7c", "oidc~auth0%7C5f7c"),
        ("auth0%7C5f7c", "oidc~auth0%257C5f7c"),
        ("a/b: c", "oidc~a%2Fb%3A%20c"),
        ("é", "oidc~%C3%A9"),
        ("~x", "oidc~%7Ex"),
        ("x" * 59, "oidc~" + "x" * 59),
    ],
)
def test_a_subject_can_be_told_from_its_name(subject: str, name: str) -> None:
    assert owner.of_subject(subject) == name


def test_a_long_subject_is_no_others_that_is_called_as_its_name() -> None:
    name = owner.of_subject("x" * 60)
    assert name.startswith("oidc~~") and len(name) == 49
    assert owner.of_subject(name.removeprefix("oidc~")) != name
    assert owner.of_subject("x" * 61) != name


@pytest.mark.parametrize(
    "name", ["a b", "", "x" * 65, "oidc~", "oidc~a|b", "oidc~~short", "all/of:them", "*"]
)
def test_what_no_owner_is_called_is_refused_when_it_is_asked_about(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        owner.named(name)
    assert caught.value.field == "owner"


def test_nobody_is_called_nothing() -> None:
    with pytest.raises(InvalidRequest):
        owner.of_subject("")
