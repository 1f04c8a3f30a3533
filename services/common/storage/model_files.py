"""What a model leaves on the shared volume besides its checkpoints, and its deletion.

Invariant: a deletion that broke off is made up for by the next one. All of this blocks.
"""

from __future__ import annotations

from collections.abc import Collection

from services.common.storage.data_dir import DataDir
from services.common.storage.directory import delete_directory


def delete_state(data: DataDir, model_id: str) -> None:
    """Deletes the durable training state of a closed model. Raises OSError."""
    delete_directory(data.state(model_id))


def delete_snapshots(data: DataDir, model_id: str, kept: Collection[int]) -> None:
    """Deletes the stored sampler snapshots of a closed model but these versions.

    Raises:
        OSError: something cannot be deleted; a repeat goes on with the rest.
    """
    parent = data.snapshots(model_id)
    # What is not a version was left behind by a write or a deletion that broke off.
    names = {str(version) for version in kept}
    for path in list(parent.iterdir()) if parent.is_dir() else []:
        if path.name not in names:
            delete_directory(path)
    if parent.is_dir() and not any(parent.iterdir()):
        parent.rmdir()
