"""What a row of the matrix is, and how it is asked and told.

Invariant: what is expected stands in the rows, and does not come from the table of rights that is tested.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

CALLERS = (
    "no key",
    "wrong key",
    "revoked key",
    "expired key",
    "read-only key",
    "another owner",
    "another owner, published",
    "admin",
    "its owner",
)
NOBODY = CALLERS[:4]

_CHECKPOINT = "training_runs/{training_run_id}/checkpoints/{kind}/{name}"
SCOPED = {
    "train": """CreateModel|CreateModelFromState|UnloadModel|ForwardBackward|OptimStep|LoadState|SaveState
        |SaveExternal|SaveForSampler|POST create_model|POST unload_model|POST forward_backward|POST forward
        |POST optim_step|POST load_weights|POST save_weights|POST save_weights_external
        |POST save_weights_for_sampler""",
    "sample": """CreateSamplingSession|Sample|StreamSample|CancelSample|POST create_sampling_session
        |POST asample|POST cancel_future|POST completions|POST chat/completions|POST messages""",
    "checkpoints": f"""ReadExternalWeights|DeleteCheckpoint|SetCheckpointTtl|PublishCheckpoint
        |UnpublishCheckpoint|GET {_CHECKPOINT}/external_weights_urls|DELETE {_CHECKPOINT}
        |PUT {_CHECKPOINT}/ttl|POST {_CHECKPOINT}/publish|DELETE {_CHECKPOINT}/publish|POST copy_weights""",
}
"""What a key that is limited to a scope may do that one limited to another may not."""
SCOPES = tuple(SCOPED)
_SCOPES_OF = {method.strip(): scope for scope, names in SCOPED.items() for method in names.split("|")}

Kind = Literal["none", "owned", "readable", "changed", "admin"]
"""What a method is about: no object; an object of an owner; a checkpoint that all may read once it is
published, or that only its owner may change; the administration."""

_numbers = itertools.count(1000)


@dataclass(frozen=True)
class World:
    """What an owner has: one of everything, its checkpoints published or not."""

    session: str
    model: str
    weights: str
    sampler: str
    export: str
    sampling: str
    request: str
    """Of a sample that waits."""
    admin: dict[str, str] = field(default_factory=dict)
    """Ids of keys to end, and something that cannot be read."""

    @property
    def number(self) -> int:
        """One that nothing of this world has yet."""
        return next(_numbers)


@dataclass(frozen=True)
class Row:
    """One method.

    Attributes:
        method: as `rights.NEEDS` names it.
        kind: what it is about.
        ask: what it is asked: a message of gRPC, or (path, JSON, content, headers) of HTTP.
        reads: role read may.
        through: what it comes to when the caller may: 200, or why it cannot be done in this world.
        fresh: it ends what it is asked about.
        in_own_session: the session in the request is the caller's own, and what is asked for another's.
        lasts: it ends in order when its call's time is nearly over.
        before: where it is served, below the server.
    """

    method: str
    kind: Kind
    ask: Callable[[World], Any]
    reads: bool = False
    through: str = "200"
    fresh: bool = False
    in_own_session: bool = False
    lasts: bool = False
    before: str = "/api/v1/"

    def expected(self, caller: str) -> str:
        """What one of CALLERS is answered."""
        if caller in NOBODY:
            return "401"
        if self.kind == "admin":
            return self.through if caller == "admin" else "403"
        if caller == "read-only key":
            return self.through if self.reads else "403"
        if caller == "its owner" or self.kind == "none":
            return self.through
        if caller == "another owner, published" and self.kind in ("readable", "changed"):
            return self.through if self.kind == "readable" else "403"
        return "404"

    def lets_in(self, scope: str) -> bool:
        """Whether the owner's key that is limited to a scope is let through."""
        if self.kind == "admin" or self.through == "403":
            return False
        return _SCOPES_OF.get(self.method, scope) == scope

    @property
    def protocol(self) -> str:
        return "HTTP" if " " in self.method else "gRPC"


def told(outcome: str) -> str:
    """An outcome for people: only who is refused for who they are is."""
    return outcome if outcome in ("401", "403", "404") else "yes"


def table(rows: list[Row], outcomes: dict[tuple[str, str], str]) -> str:
    """The matrix in Markdown."""
    lines = []
    for protocol in ("gRPC", "HTTP"):
        columns = [protocol, *CALLERS, "scopes"]
        lines += ["", f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
        for row in rows:
            if row.protocol == protocol:
                cells = " | ".join(told(outcomes[row.method, caller]) for caller in CALLERS)
                scopes = [scope for scope in SCOPES if outcomes[row.method, scope] == "yes"]
                lines.append(f"| `{row.method}` | {cells} | {_of(scopes)} |")
    return "\n".join(lines) + "\n"


def _of(scopes: list[str]) -> str:
    return "any" if scopes == list(SCOPES) else ", ".join(scopes) or "-"
