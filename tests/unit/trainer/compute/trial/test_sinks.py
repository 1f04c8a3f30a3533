"""Sinks are given to a device's kernel where that was found right with them, on every rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from services.trainer.compute import attention, exchange
from services.trainer.compute.prefix import flash
from services.trainer.compute.split.asked import Asked, splits
from services.trainer.compute.trial import sinks
from services.trainer.compute.trial.sinks import with_sinks
from tests.unit.trainer.compute.prefix.kernels import Absent, Plain
from tests.unit.trainer.compute.trial.test_own_forward import made, tried

SLIDING = Asked(4, 2, 768, 128, kernel=False, plain=False, sinks=True)
FULL = replace(SLIDING, window=None)
CAPPED = replace(FULL, sinks=False)
PLAIN = replace(CAPPED, kernel=True, plain=True)


@pytest.fixture(autouse=True)
def nothing_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(attention, "_right_with_sinks", set())


def test_layers_with_sinks_have_a_kernel_once_it_was_found_right() -> None:
    found = with_sinks([SLIDING, FULL, CAPPED, PLAIN], "cpu", 1, Plain())
    assert found == [replace(SLIDING, kernel=True), replace(FULL, kernel=True), CAPPED, PLAIN]
    assert attention._right_with_sinks == {(4, 2, 64)}
    assert not any(layer.scored or layer.masked for layer in found if layer.sinks)


def test_layers_with_sinks_stay_as_they_are_where_it_was_not() -> None:
    assert with_sinks([SLIDING, FULL, CAPPED, PLAIN], "cpu", 1, Absent()) == [SLIDING, FULL, CAPPED, PLAIN]
    assert attention._right_with_sinks == set()
    assert SLIDING.scored and CAPPED.scored and not PLAIN.scored


def test_of_several_shapes_each_is_tried_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "works_with_sinks", lambda device, kernel, *shape: shape == (8, 2, 64))
    other = replace(FULL, heads=8, elements=1280)
    assert with_sinks([FULL, other], "cpu", 1) == [FULL, replace(other, kernel=True)]
    assert attention._right_with_sinks == {(8, 2, 64)}


def test_what_another_rank_found_wrong_no_rank_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "least", lambda numbers, device: [0] * len(numbers))
    assert with_sinks([FULL], "cpu", 1, Plain()) == [FULL]
    assert attention._right_with_sinks == set()


@pytest.mark.parametrize(
    ("ranks", "shapes", "shares"),
    [(1, {(4, 2, 64)}, False), (2, {(4, 2, 64), (2, 1, 64)}, True), (3, {(4, 2, 64)}, False)],
    ids=["one rank", "two ranks", "ranks that do not divide the heads"],
)
def test_ranks_share_a_sequence_whose_sinks_a_kernel_computes_once_it_was_tried_with_the_heads_of_each(
    ranks: int, shapes: set[tuple[int, int, int]], shares: bool
) -> None:
    assert not splits([FULL], ranks)
    assert splits(with_sinks([FULL, SLIDING], "cpu", ranks, Plain()), ranks) == shares
    assert attention._right_with_sinks == shapes


def test_a_kernel_that_is_wrong_with_the_heads_of_each_rank_is_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sinks, "works_with_sinks", lambda device, kernel, *shape: shape == (4, 2, 64))
    assert with_sinks([FULL], "cpu", 2) == [FULL]
    assert attention._right_with_sinks == set()


@pytest.mark.parametrize(
    ("model_type", "before", "after"),
    [("gpt_oss", (True, False), (True, True)), ("gemma2", (False, False), (False, False))],
    ids=["sinks", "capped scores"],
)
def test_a_layer_says_that_sinks_alone_keep_the_kernel_from_it_until_that_was_given_them(
    model_type: str, before: tuple[bool, bool], after: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_has_kernel", lambda query, value: True)
    monkeypatch.setattr(flash, "FlashAttention", Plain)
    model, flat = made(model_type, torch.float32)
    for expected in (before, after):
        asked = tried(model, flat)
        assert [(layer.sinks, layer.kernel) for layer in asked] == [expected] * 2
        assert not any(layer.plain for layer in asked)
        attention.give_kernel_sinks(4, 2, 8)
