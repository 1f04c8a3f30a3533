"""What a model's head computes: a policy log-probabilities of tokens, a critic one value per position.

Invariant: a model has its role from its creation for ever, and its losses are those of its role.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from services.common.contract.errors import InvalidRequest
from tinsmith.v1 import models_pb2

Role = Literal["policy", "critic"]

METADATA_KEY = "model_role"
"""Key of a model's user_metadata by which clients without a field for the role name it."""

CRITIC_LOSSES = ("ppo_critic",)

_NAMES: dict[str, Role] = {"policy": "policy", "critic": "critic"}
_FROM_PB: dict[int, Role] = {
    models_pb2.MODEL_ROLE_UNSPECIFIED: "policy",
    models_pb2.MODEL_ROLE_POLICY: "policy",
    models_pb2.MODEL_ROLE_CRITIC: "critic",
}


def from_pb(role: models_pb2.ModelRole.ValueType) -> Role:
    """The role of a message; unset is a policy.

    Raises:
        InvalidRequest: a number that this version does not know.
    """
    known = _FROM_PB.get(role)
    if known is None:
        raise InvalidRequest(f"role {role} is unknown; use MODEL_ROLE_POLICY or MODEL_ROLE_CRITIC")
    return known


def to_pb(role: Role) -> models_pb2.ModelRole.ValueType:
    return models_pb2.MODEL_ROLE_CRITIC if role == "critic" else models_pb2.MODEL_ROLE_POLICY


def asked_for(metadata: Mapping[str, str], field: Role | None = None) -> Role | None:
    """The role that a request for a model names, in its field or its user_metadata; None: neither does.

    Raises:
        InvalidRequest: there is no such role, or the two name different ones.
    """
    named = metadata.get(METADATA_KEY)
    if named is None:
        return field
    role = _NAMES.get(named)
    if role is None:
        raise InvalidRequest(
            f"user_metadata has {METADATA_KEY} {named[:100]!r}, which is no role; use 'policy' or 'critic', "
            "or leave it out for a policy",
            "unknown_role",
        )
    if field not in (None, role):
        raise InvalidRequest(f"the role is {field} but user_metadata has {METADATA_KEY} {role!r}; name one")
    return role


def check_loss(role: Role, loss_fn: str) -> None:
    """Refuses a loss that the head of a model of this role cannot give.

    Raises:
        InvalidRequest: with what to do.
    """
    if role == "critic" and loss_fn not in CRITIC_LOSSES:
        raise InvalidRequest(
            f"this model is a critic, which has values and no token probabilities: {loss_fn} cannot be "
            f"computed; use {' or '.join(CRITIC_LOSSES)}, or train a policy",
            "wrong_role",
        )
    if role == "policy" and loss_fn in CRITIC_LOSSES:
        raise InvalidRequest(
            f"{loss_fn} needs a critic and this model is a policy; create the model with user_metadata "
            f"{{'{METADATA_KEY}': 'critic'}} (in gRPC with role MODEL_ROLE_CRITIC)",
            "wrong_role",
        )


def check_trains_head(role: Role, train_unembed: bool) -> None:
    """Refuses a critic whose head would stay what it starts as, zero.

    Raises:
        InvalidRequest: with what to do.
    """
    if role == "critic" and not train_unembed:
        raise InvalidRequest(
            "train_unembed of a critic stands for its value head, which is always trained; set it to true"
        )


def check_exports(role: Role) -> None:
    """Refuses to export a critic.

    Raises:
        InvalidRequest: with what to do.
    """
    if role == "critic":
        raise InvalidRequest(
            "this model is a critic, and PEFT's format has no place for its value head; save_state keeps it",
            "wrong_role",
        )


def check_samples(role: Role) -> None:
    """Refuses to sample from a critic.

    Raises:
        InvalidRequest: with what to do.
    """
    if role == "critic":
        raise InvalidRequest(
            "this model is a critic: it has values and no tokens to sample; forward gives its values, and "
            "save_state saves it",
            "wrong_role",
        )
