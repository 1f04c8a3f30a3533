"""What an operator may have run in place of the loss stable_reinforce.

Invariant: each of them takes the inputs that a datum for stable_reinforce has, and needs no setting.
"""

from __future__ import annotations

STABLE_REINFORCE = "stable_reinforce"
STAND_INS = ("importance_sampling", "ppo", "cispo", "gspo")


def served(stand_in: str) -> tuple[str, ...]:
    """The losses that are served only because the operator named a stand-in; empty: none is."""
    return (STABLE_REINFORCE,) if stand_in else ()


def that_runs(loss_fn: str, stand_in: str) -> str:
    """The loss that runs where `loss_fn` is asked for.

    Args:
        stand_in: one of STAND_INS, as the operator says; empty: every loss runs as what it is.
    """
    return stand_in if stand_in and loss_fn == STABLE_REINFORCE else loss_fn
