"""How much memory a sampler on CPU gives to keys and values: a pure function of the model and the machine.

Invariant: what is chosen holds at least one sequence of the context that is served, where all layers keep all
of it, and is no more than a quarter of its part of the machine's memory, or 1 GiB if that is more, unless the
operator says so: the weights, the trainer and its copy of them, and Redis want the rest.

Layers with a window or a recurrent state are counted as if they kept every token. vLLM has blocks of their
own for these, by groups of layers, and so needs less for long contexts, and a little more for those of about
a window and a step: what is chosen just so for such a one it refuses itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from services.sampler.config import GIB

_SHARE = 4
_BLOCK_TOKENS = 128
"""Of vLLM on a CPU, which keeps one block for itself; of latent attention they are smaller."""
_PAGE_TOKENS = 2 * _BLOCK_TOKENS
"""Contexts that are cut come in whole numbers of these."""


@dataclass(frozen=True)
class CpuCache:
    """`kv_bytes`: of keys and values. `context`: most tokens of a sequence."""

    kv_bytes: int
    context: int


def choose(
    *, token_bytes: int, model_context: int, wanted_context: int, given_bytes: int, memory: int
) -> CpuCache:
    """The memory for keys and values, and the longest sequence that it holds.

    Args:
        token_bytes: of the keys and values of one token, over all layers.
        model_context: most tokens that the model takes.
        wanted_context: as the operator limits it; 0 = not at all.
        given_bytes: as the operator says; 0 = choose.
        memory: of the machine, or the container, in bytes; of several samplers there, or workers, each one's
            equal part.

    Raises:
        ValueError: a context was asked for that does not fit, or none does; says what to change. Of a model
            with windows or recurrent layers vLLM may refuse what this takes, by a few blocks.
    """
    context = wanted_context or model_context
    # Room for two whole contexts, and for a prefix cache worth the name on tiny models.
    ideal = max(GIB, 2 * context * token_bytes)
    kv_bytes = given_bytes or min(ideal, max(GIB, memory // _SHARE))
    fits = max(kv_bytes // (_BLOCK_TOKENS * token_bytes) - 1, 0) * _BLOCK_TOKENS
    if fits >= context:
        return CpuCache(kv_bytes, context)
    if wanted_context or fits < _PAGE_TOKENS:
        lower = f"lower --max-context to {fits}, or " if fits else ""
        least = context if wanted_context else min(context, _PAGE_TOKENS)
        needed = (-(-least // _BLOCK_TOKENS) + 1) * _BLOCK_TOKENS * token_bytes
        raise ValueError(
            f"keys and values of {least} tokens take {_gib(needed, up=True)} GiB, and "
            f"{_gib(kv_bytes, up=False)} GiB are set aside for them: {lower}raise --kv-cache-gib"
        )
    return CpuCache(kv_bytes, fits // _PAGE_TOKENS * _PAGE_TOKENS)


def _gib(size: int, *, up: bool) -> str:
    """Bytes in GiB, to three digits or more. Of two sizes the larger one, rounded up, is also the larger one
    in print, and enough to give."""
    places = max(0, 2 - math.floor(math.log10(size / GIB)))
    units = size * 10**places
    return f"{(-(-units // GIB) if up else units // GIB) / 10**places:.{places}f}"
