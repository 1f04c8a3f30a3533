"""The head of a model that ties it to its embedding comes to nothing, whatever files call it."""

from __future__ import annotations

import pytest
import torch

from services.sampler.worker.full_weights import _without_tied_head

LAYOUTS = {
    "of text": ("model.embed_tokens.weight", "lm_head.weight"),
    "of more": ("model.language_model.embed_tokens.weight", "lm_head.weight"),
    "of more, older": ("language_model.model.embed_tokens.weight", "language_model.lm_head.weight"),
}


@pytest.mark.parametrize(("embedding", "head"), LAYOUTS.values(), ids=LAYOUTS)
def test_a_head_that_is_the_embedding_is_left_out_and_another_one_refused(embedding: str, head: str) -> None:
    weight, other = torch.ones(2, 2), torch.zeros(2, 2)
    given = {head: weight, embedding: weight, "model.norm.weight": other}
    found = dict(_without_tied_head(given.items()))
    assert found == {name: tensor for name, tensor in given.items() if name != head}
    with pytest.raises(ValueError, match="differs"):
        dict(_without_tied_head({**given, head: other}.items()))
