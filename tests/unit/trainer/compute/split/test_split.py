"""Which part of a long sequence each rank has, and of which models ranks can share one at all."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from services.trainer.compute.attention import FLAT_ATTENTION, Sequences, register
from services.trainer.compute.collate import collate
from services.trainer.compute.split.asked import Asked, splits
from services.trainer.compute.split.exchange import Attention, Exchange
from services.trainer.compute.split.share import Share
from tests.component.engine.data import ce_row, critic_row
from tests.unit.trainer.compute.architectures import FLAT, HYBRID, config_of, random_model

PLAIN = Asked(heads=8, key_heads=4, elements=192, window=None, kernel=False, plain=True)
NOT_USED = cast(Exchange, SimpleNamespace())


def shares(tokens: int, ranks: int) -> list[Share]:
    return [Share(rank, ranks, tokens) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("tokens", [1, 2, 5, 7, 8, 64, 1001])
def test_parts_follow_each_other_and_all_ranks_compute_equally_many_tokens(tokens: int, ranks: int) -> None:
    parts = shares(tokens, ranks)
    assert [token for part in parts for token in range(part.start, part.stop)] == list(range(tokens))
    assert {part.size for part in parts} == {-(-tokens // ranks)}
    assert all(part.stop - part.start + part.filled == part.size for part in parts)
    assert sum(part.filled for part in parts) < ranks * max(1, tokens if tokens < ranks else 1)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("columns", [0, 3])
@pytest.mark.parametrize("length", [1, 8, 11])
def test_the_parts_of_a_row_together_have_its_tokens_and_its_targets_once(
    length: int, columns: int, ranks: int
) -> None:
    row = ce_row(1, length, columns=columns)
    batch = collate([row], "cpu", shared=False)
    tokens, ids = [], []
    for share in shares(length, ranks):
        part = batch.part(share, NOT_USED)
        assert part.tokens.shape == part.sequences.positions.shape == (1, share.size)
        assert part.targets.positions == share.size
        assert part.ops == [(0, share.size)]
        assert batch.outputs(share) == (part.targets.ids.numel(), 0)
        tokens.append(part.tokens[0, : share.stop - share.start])
        ids.append(part.targets.ids)
    assert torch.equal(torch.cat(tokens), batch.tokens[0])
    assert torch.equal(torch.cat(ids), batch.targets.ids)


def test_a_critics_parts_have_values_and_no_targets() -> None:
    batch = collate([critic_row(1, 7)], "cpu", shared=False)
    parts = [batch.part(share, NOT_USED) for share in shares(7, 2)]
    assert [part.targets.positions for part in parts] == [0, 0]
    assert [batch.outputs(share) for share in shares(7, 2)] == [(0, 4), (0, 3)]


def test_tokens_know_where_they_stand_in_the_whole_sequence() -> None:
    parts = [Sequences.part(share, NOT_USED, "cpu") for share in shares(7, 3)]
    positions = [part.positions.tolist() for part in parts]
    # What fills up the last part stands where a model that knows 7 positions still has one.
    assert positions == [[[0, 1, 2]], [[3, 4, 5]], [[6, 6, 6]]]
    assert all(part.split is not None and part.split.whole.lengths == (9,) for part in parts)


@pytest.mark.parametrize(
    ("asked", "ranks", "found"),
    [
        ([PLAIN, PLAIN], 2, True),
        ([PLAIN, PLAIN], 4, True),
        ([PLAIN, PLAIN], 8, False),
        ([PLAIN, PLAIN], 1, False),
        ([], 2, False),
        ([PLAIN, replace(PLAIN, key_heads=1)], 2, False),
        ([PLAIN, replace(PLAIN, heads=6)], 4, False),
        ([PLAIN, replace(PLAIN, plain=False)], 2, False),
        ([PLAIN, replace(PLAIN, window=5)], 2, False),
        ([PLAIN, replace(PLAIN, window=5, kernel=True)], 2, True),
        ([PLAIN, replace(PLAIN, plain=False, recurrent=True)], 2, True),
        ([PLAIN, replace(PLAIN, plain=False, recurrent=True)], 8, False),
    ],
    ids=[
        "two ranks",
        "as many as there are heads of keys",
        "more than those",
        "one rank",
        "one sequence at a time",
        "a layer with fewer heads of keys",
        "a layer with other heads",
        "sinks or capped scores",
        "a window",
        "a window with FlashAttention",
        "a state from token to token",
        "a state of fewer heads",
    ],
)
def test_ranks_share_a_sequence_where_each_has_whole_heads_and_nothing_else_is_asked_for(
    asked: list[Asked], ranks: int, found: bool
) -> None:
    assert splits(asked, ranks) is found


def test_a_window_as_long_as_the_context_is_none() -> None:
    sliding = replace(PLAIN, window=64)
    assert sliding.within(64) == PLAIN
    assert sliding.within(65) == sliding
    assert PLAIN.within(64) == PLAIN


@pytest.mark.parametrize("model_type", FLAT)
def test_each_layer_of_an_architecture_says_what_it_asks_for(model_type: str) -> None:
    register()
    config = config_of(model_type, FLAT[model_type])
    model = random_model(config, FLAT_ATTENTION)
    asked: list[Asked] = []
    sequences = replace(Sequences.of([1], "cpu"), asked=asked)
    with torch.no_grad():
        ids = torch.ones(1, 1, dtype=torch.int64)
        model(ids, use_cache=False, position_ids=sequences.positions, sequences=sequences)
    assert len(asked) == config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(asked)
    if model_type in ("mistral", "phi3", "mixtral"):
        kinds = ["sliding_attention"] * len(asked)
    assert [layer.window is not None for layer in asked] == [kind == "sliding_attention" for kind in kinds]
    recurrent = [kind == "linear_attention" for kind in kinds]
    assert [layer.recurrent for layer in asked] == recurrent
    plain = [not state and model_type not in ("gemma2", "gpt_oss") for state in recurrent]
    assert [layer.plain for layer in asked] == plain
    assert all(layer.heads == 4 for layer in asked if not layer.recurrent)
    expected = {"llama", "qwen2", "qwen2_moe", "qwen3_moe", "glm4_moe", "deepseek_v3", *HYBRID}
    assert splits(asked, 2) == (model_type in expected)


def test_ranks_have_exchanged_something_before_anybody_asks_what_memory_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a device's backend needs for it, it takes at the first exchange."""
    exchanged: list[tuple[int, ...]] = []

    def attend(self: Exchange, attention: Attention, *given: Tensor) -> None:
        exchanged.extend(tuple(each.shape) for each in given)

    monkeypatch.setattr(Exchange, "attend", attend)
    Exchange(4, "cpu")
    assert [shape[:3] for shape in exchanged] == [(1, 4, 1)] * 3, "a head for each rank, and a token"
