"""What the layers of a model ask of attention, and whether ranks can share a sequence of it. Pure.

An architecture is asked by computing one token, so nothing is believed of names in its configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Asked:
    """What one layer asks for.

    Attributes:
        heads: of queries, `key_heads`: of keys and of values.
        elements: of a token's queries, keys, values and what comes out, all heads together.
        window: tokens that each sees, itself included; None: all before it.
        kernel: one kernel computes it, whose memory does not grow with pairs of tokens, window or not.
        plain: it is softmax attention and nothing beside, as capped scores or sinks would be.
        sinks: it has some, and nothing else keeps a kernel from it. They do until it was tried with them.
        recurrent: it carries a state from token to token.
    """

    heads: int
    key_heads: int
    elements: int
    window: int | None
    kernel: bool
    plain: bool
    sinks: bool = False
    recurrent: bool = False

    def within(self, context_length: int) -> Asked:
        """The same of sequences of so many tokens: a window that none of them leaves is none."""
        seen = self.window is not None and self.window >= context_length
        return replace(self, window=None) if seen else self

    @property
    def shape(self) -> tuple[int, int, int]:
        """Heads, those of keys, and the size of each, where queries, keys and values have the same."""
        return self.heads, self.key_heads, self.elements // (2 * (self.heads + self.key_heads))

    @property
    def scored(self) -> bool:
        """Its scores are whole matrices."""
        return not (self.plain or self.kernel or self.recurrent)

    @property
    def masked(self) -> bool:
        """Who sees whom takes a matrix, in a sequence that is longer than the window."""
        return self.window is not None and not self.kernel


def splits(asked: Sequence[Asked], ranks: int) -> bool:
    """Whether so many ranks can compute a sequence together.

    Each rank computes some heads of the whole sequence, so there must be as many of them for each, in every
    layer. Masks and scores of pairs of tokens would not become less by it, as where there are sinks and no
    kernel.

    Args:
        asked: of each layer; none of an architecture that computes one sequence at a time.
    """
    return (
        ranks > 1
        and bool(asked)
        and all(
            (layer.plain or layer.recurrent or (layer.sinks and layer.kernel))
            and not layer.masked
            and layer.heads % ranks == 0
            and layer.key_heads % ranks == 0
            for layer in asked
        )
    )
