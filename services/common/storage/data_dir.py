"""Where things lie below the data directory.

Invariant: every path returned is inside the data directory, because each id is checked against
its grammar before it becomes a path component.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from services.common.contract import ids
from services.common.contract.errors import InvalidRequest

NAMES = frozenset(
    {
        *("api_key", "cluster_id", "volume_id", "run", "logs", "redis", "tls", "cache"),
        *("checkpoints", "staging", "snapshots", "state"),
    }
)
"""What a cluster makes in its data directory."""


@dataclass(frozen=True)
class DataDir:
    """The directory that gateway, trainers and samplers share."""

    root: Path

    @property
    def api_key(self) -> Path:
        """File with the API key of a local cluster."""
        return self.root / "api_key"

    @property
    def cluster_id(self) -> Path:
        """File that tells which Redis knows the models here."""
        return self.root / "cluster_id"

    @property
    def volume_id(self) -> Path:
        """File that tells this volume from others, which may be mounted in its place."""
        return self.root / "volume_id"

    @property
    def run(self) -> Path:
        """Directory of <process name>.pid files."""
        return self.root / "run"

    @property
    def logs(self) -> Path:
        """Directory of <process name>.log files."""
        return self.root / "logs"

    @property
    def redis(self) -> Path:
        """Working directory of the embedded Redis server."""
        return self.root / "redis"

    @property
    def redis_url(self) -> Path:
        """File that tells where the running cluster's Redis is; readable by the owner only."""
        return self.run / "redis_url"

    @property
    def tls(self) -> Path:
        """The authority of a local cluster, and a directory for each role with its identity."""
        return self.root / "tls"

    @property
    def checkpoints(self) -> Path:
        """Named checkpoints and exports, unless they are kept elsewhere."""
        return self.root / "checkpoints"

    @property
    def staging(self) -> Path:
        """Files on their way to or from an object store."""
        return self.root / "staging"

    def snapshot(self, model_id: str, version: int) -> Path:
        """Directory of an immutable sampler snapshot: a PEFT adapter, or a model in Hugging Face's format."""
        return self.snapshots(model_id) / str(int(version))

    def snapshots(self, model_id: str) -> Path:
        """Directory that holds a model's sampler snapshots, one folder per version."""
        return self.root / "snapshots" / _model(model_id)

    def state(self, model_id: str) -> Path:
        """Directory that holds a model's durable training snapshots, one folder per seq_id."""
        return self.root / "state" / _model(model_id)


def _model(model_id: str) -> str:
    if not ids.is_model_id(model_id):
        raise InvalidRequest(f"{model_id[:200]!r} is not a model id")
    return model_id
