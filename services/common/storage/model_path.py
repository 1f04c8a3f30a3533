"""Whether the files of a base model are there.

Invariant: a directory that is missing or cannot be read is never taken for the name of a repository on a hub.
"""

from __future__ import annotations

import os
from pathlib import Path

from services.common.contract.errors import InvalidRequest


def check_model_path(path: str) -> None:
    """Looks whether a model can be read from an absolute path; what a hub has is its library's. Blocking.

    Raises:
        InvalidRequest: there is no such directory, it holds no model, or this process may not read it.
    """
    directory = Path(path)
    if not directory.is_absolute():
        return
    try:
        next(directory.iterdir(), None)
        (directory / "config.json").open("rb").close()
    except FileNotFoundError as error:
        raise InvalidRequest(f"there is no {error.filename}: put the model's files into {path}") from error
    except PermissionError as error:
        raise InvalidRequest(
            f"user {os.getuid()} may not read {error.filename}: give everybody read access to {path}"
        ) from error
    except OSError as error:
        raise InvalidRequest(f"the model in {path} cannot be read: {error}") from error
