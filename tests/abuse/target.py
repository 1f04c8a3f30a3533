"""What is attacked: the ports of a cluster, the attacker's key, and names of what exists in it."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.cluster.conftest import BASE_MODEL


@dataclass(frozen=True)
class Target:
    """A cluster as the attacker knows it.

    Attributes:
        key: of the attacker, who is somebody with an account.
        session_id, model_id, sampling_session_id: the attacker's own.
        others: ids of somebody else's session, model and sampling session.
    """

    host: str
    port: int
    grpc_port: int
    key: str
    session_id: str
    model_id: str
    sampling_session_id: str
    others: list[str] = field(default_factory=list)

    @property
    def known(self) -> list[str]:
        """Names that mean something here."""
        own = [self.session_id, self.model_id, self.sampling_session_id, f"{self.model_id}:1"]
        paths = [f"tinker://{self.model_id}/weights/a", f"tinker://{self.model_id}/sampler_weights/a"]
        return [BASE_MODEL, *own, *paths, *self.others]
