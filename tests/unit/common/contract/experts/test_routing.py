"""Ids of experts that a model can compute with, and those that it cannot."""

from __future__ import annotations

import numpy as np
import pytest

from services.common.contract.errors import InvalidRequest
from services.common.contract.experts.routing import RoutedExperts, Routing, check

SMALL, LARGE = Routing(layers=2, top_k=2, experts=256), Routing(layers=1, top_k=2, experts=257)
CHOSEN = np.array([[[0, 255], [3, 1]], [[7, 8], [1, 3]], [[4, 5], [2, 0]]], np.uint8)


def routed(ids: np.ndarray) -> RoutedExperts:
    return RoutedExperts(ids.shape, ids.tobytes())


def test_up_to_256_experts_take_a_byte_each_and_more_take_two() -> None:
    assert (SMALL.nbytes(10), LARGE.nbytes(10)) == (40, 40)
    assert (SMALL.dtype, LARGE.dtype) == (np.uint8, np.uint16)


def test_what_a_model_may_choose_is_taken_and_read_as_it_was_sent() -> None:
    check(routed(CHOSEN), SMALL, 3, "ids")
    assert (routed(CHOSEN).values() == CHOSEN).all()
    wide = np.array([[[256, 255]]], "<u2")
    check(routed(wide), LARGE, 1, "ids")
    assert (routed(wide).values() == wide).all()


@pytest.mark.parametrize(
    ("given", "routing", "tokens", "says"),
    [
        (routed(CHOSEN), SMALL, 4, r"has the shape \[3, 2, 2\].* for 4 tokens it must be \[4, 2, 2\]"),
        (routed(CHOSEN), LARGE, 3, r"1 routed layers with 2 experts a token"),
        (routed(CHOSEN[0]), SMALL, 3, r"has the shape \[2, 2\]"),
        (RoutedExperts((-3, -2, 2), CHOSEN.tobytes()), SMALL, 3, "has the shape"),
        (RoutedExperts((3,) * 1000, b""), SMALL, 3, r"has the shape \[3, 3, 3, 3\]"),
        (
            RoutedExperts((3, 2, 2), CHOSEN.tobytes() + b"\0"),
            SMALL,
            3,
            "has 13 bytes; .* are 12, as each takes 1",
        ),
        (routed(np.array([[[1, 257]]], "<u2")), LARGE, 1, "has expert 257; the model's are 0 to 256"),
        (routed(np.array([[[9, 9]]], "<u2")), LARGE, 1, "an expert twice"),
    ],
)
def test_what_it_cannot_compute_with_is_refused(
    given: RoutedExperts, routing: Routing, tokens: int, says: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"^ids.*{says}"):
        check(given, routing, tokens, "ids")
