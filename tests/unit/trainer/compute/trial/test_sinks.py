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
    found = with_sinks([SLIDING, FULL, CAPPED, PLAIN], "cpu", Plain())
    assert found == [replace(SLIDING, kernel=True), replace(FULL, kernel=True), CAPPED, PLAIN]
    assert attention._right_with_sinks == {(4, 2, 64)}
    assert not any(layer.scored or layer.masked for layer in found if layer.sinks)


def test_layers_with_sinks_stay_as_they_are_where_it_was_not() -> None:
    assert with_sinks([SLIDING, FULL, CAPPED, PLAIN], "cpu", Absent()) == [SLIDING, FULL, CAPPED, PLAIN]
    assert attention._right_with_sinks == set()
    assert SLIDING.scored and CAPPED.scored and not PLAIN.scored


def test_of_several_shapes_each_is_tried_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "works_with_sinks", lambda device, kernel, *shape: shape == (8, 2, 64))
    other = replace(FULL, heads=8, elements=1280)
    assert with_sinks([FULL, other], "cpu") == [FULL, replace(other, kernel=True)]
    assert attention._right_with_sinks == {(8, 2, 64)}


def test_what_another_rank_found_wrong_no_rank_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "least", lambda numbers, device: [0] * len(numbers))
    assert with_sinks([FULL], "cpu", Plain()) == [FULL]
    assert attention._right_with_sinks == set()


def test_a_kernel_with_sinks_has_no_ranks_share_a_sequence() -> None:
    """Each computes some heads, and is given the sinks of all."""
    assert splits([PLAIN], 2)
    assert not splits(with_sinks([FULL], "cpu", Plain()), 2)


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
