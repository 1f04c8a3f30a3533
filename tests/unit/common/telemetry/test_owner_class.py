"""What is measured of owners without naming them."""

from __future__ import annotations

from services.common.telemetry.owner_class import by_class, class_of


def test_an_owner_alone_is_light_whatever_it_has() -> None:
    assert class_of("ann", {"ann": 1000}, 1000) == "light"
    assert class_of("ann", {}, 0) == "light"


def test_who_has_more_than_an_even_share_is_heavy_and_the_others_are_not() -> None:
    held = {"ann": 7, "bob": 1, "cleo": 1}
    assert [class_of(owner, held, 9) for owner in ("ann", "bob", "cleo", "dan")] == [
        "heavy",
        "light",
        "light",
        "light",
    ]
    assert {class_of(owner, {"ann": 4, "bob": 4}, 8) for owner in ("ann", "bob")} == {"light"}


def test_what_the_owners_of_each_class_have_adds_up() -> None:
    assert by_class({"ann": 7, "bob": 1, "cleo": 1}) == {"light": 2, "heavy": 7}
    assert by_class({}) == {"light": 0, "heavy": 0}
