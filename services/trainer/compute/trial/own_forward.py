"""Whether the trainer computes what a model computes itself, found by computing a few tokens both ways.

The trainer takes a causal language model apart: it gives the backbone embeddings, and takes hidden states
from it straight to log-probabilities (`Scorer`). What an architecture does to embeddings on their way to its
blocks, or to logits after its head, would be left out without a word. Names of settings do not tell: each
architecture has its own.

Invariant: a model that comes to other log-probabilities by itself is refused, on all ranks alike. What it
does to logits is found however little it changes; anything else, if it is more than what rounding does.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from services.common.contract.errors import InvalidRequest
from services.trainer.compute.attention import Sequences
from services.trainer.compute.exchange import any_rank
from services.trainer.compute.logprobs import Targets
from services.trainer.compute.sharding.stage3 import gathered
from services.trainer.compute.split.asked import Asked

Score = Callable[[Tensor, Targets, Sequences], Tensor]
"""Log-probabilities [Q] of the targets of tokens [1, T]."""

_LENGTH = 8
"""Tokens of a sequence."""
_TOGETHER = 2
"""Sequences, where several are computed at once."""
_WIDTH = 64
"""Targets of each token."""
_ERROR = {torch.float32: 1e-3, torch.bfloat16: 0.05}
"""Of how far a token's log-probabilities lie from their mean, what may be other than the model's own. Both
ways take the same kernels: this is for those that do not come to the same bits twice."""

_OF_THE_CODE = AttributeError, KeyError, NotImplementedError, TypeError, ValueError
"""What is raised where an architecture lacks something, on all ranks alike. Of memory, the device or the
other ranks torch raises RuntimeError itself."""


@dataclass(frozen=True)
class Own:
    """What a model comes to by itself.

    Attributes:
        logits: float32 [T, vocabulary].
        plain: they are what its output head gave, to the last bit.
    """

    logits: Tensor
    plain: bool


def check_own_forward(
    model: Any,
    score: Score,
    *,
    model_path: str,
    flat: bool,
    vocab_size: int,
    context_length: int,
    device: str,
) -> list[Asked]:
    """Tries a loaded model; all ranks call it, before any other pass.

    Args:
        model: as transformers loaded it, perhaps with weights that ZeRO-3 shards.
        score: what the trainer computes.
        flat: it computes several sequences at once.

    Returns:
        What each layer asked of attention; none unless `flat`.

    Raises:
        InvalidRequest: the model computes something else by itself, or needs something else to compute.
    """
    length = min(_LENGTH, context_length)
    lengths = [length] * (_TOGETHER if flat else 1)
    asked: list[Asked] = []
    sequences = replace(Sequences.of(lengths, device), asked=asked)
    tokens = _spread(sum(lengths), vocab_size).to(device)
    of_each = _spread(min(_WIDTH, vocab_size), vocab_size).to(device)
    targets = Targets(of_each.repeat(len(tokens)), ((len(tokens), len(of_each)),))
    name = f"{model_path}: {type(model).__name__}"
    try:
        with torch.no_grad():
            # Nothing was computed before: DeepSpeed begins to note the order of a pass with the next one.
            own = own_forward(model, tokens[None], sequences if flat else None)
            asked.clear()
            found = score(tokens[None], targets, sequences).view(len(tokens), -1)
    except _OF_THE_CODE as error:
        raise InvalidRequest(
            f"{name} cannot be computed as the trainer does it, from embeddings alone: "
            f"{type(error).__name__}: {error}; use another model"
        ) from error
    finite = bool(own.logits.isfinite().all())
    same = agree(found, own.logits, of_each, next(model.parameters()).dtype)
    broken, changed, other = any_rank([not finite, not own.plain, not same], device)
    if broken:
        raise InvalidRequest(
            f"{name} comes to logits that are not finite; see whether its files are whole, or take --dtype "
            "float32"
        )
    if changed:
        raise InvalidRequest(
            f"{name} changes its logits after its output head, as by a scale or a cap, which the trainer "
            "does not; use a model whose logits are the plain output of its head"
        )
    if other:
        raise InvalidRequest(
            f"{name} comes to other log-probabilities by itself than the trainer, which gives it embeddings "
            "and takes its last hidden states to the output head; use a model that does nothing else to them"
        )
    return asked


def own_forward(model: Any, tokens: Tensor, sequences: Sequences | None) -> Own:
    """What a model comes to of tokens, int64 [1, T]; a collective where its weights are sharded.

    Args:
        sequences: how they are cut, of a model that computes several at once.
    """
    flat = {} if sequences is None else {"position_ids": sequences.positions, "sequences": sequences}
    head = model.get_output_embeddings()
    made: list[Tensor] = []
    with ExitStack() as while_it_computes:
        weights = gathered(head)

        def before(*_: Any) -> None:
            weights.__enter__()

        def after(_module: Any, _given: Any, logits: Tensor) -> None:
            weights.__exit__(None, None, None)
            # Some change them where they are.
            made.append(logits.clone())

        while_it_computes.callback(head.register_forward_pre_hook(before).remove)
        while_it_computes.callback(head.register_forward_hook(after).remove)
        logits = model(input_ids=tokens, use_cache=False, **flat).logits.float()
    plain = len(made) == 1 and torch.equal(made[0].float(), logits)
    return Own(logits[0], plain)


def agree(found: Tensor, logits: Tensor, targets: Tensor, dtype: torch.dtype) -> bool:
    """Whether log-probabilities are those of logits, but for rounding, at half of the tokens at least.

    Args:
        found: float32 [T, targets].
        logits: float32 [T, vocabulary], perhaps rounded to `dtype`.
        targets: int64 [targets], the same of each token.
    """
    expected = logits.log_softmax(-1)[:, targets]
    apart = (expected - expected.mean(-1, keepdim=True)).square().mean(-1).sqrt()
    error = (found - expected).square().mean(-1).sqrt()
    rounded = torch.finfo(dtype).eps * logits.abs().amax(-1)
    # Where all logits are alike, as of weights that are all zero, this alone is left for what kernels round.
    rounded += torch.finfo(torch.float32).eps * expected.abs().amax(-1)
    same = error <= _ERROR[dtype] * apart + rounded
    return 2 * int(same.sum()) >= len(same)


def _spread(count: int, below: int) -> Tensor:
    """So many numbers from 0 to `below`, which is not among them, evenly: special tokens lie at the ends."""
    return (2 * torch.arange(count) + 1) * below // (2 * count)
