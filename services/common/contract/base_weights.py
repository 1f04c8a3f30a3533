"""Which base weights a registered name stands for: two names of one base are told by them.

Invariant: pure; a hub id and a directory of the hub's local cache are the same weights, wherever that is.
"""

from __future__ import annotations

import re
from pathlib import PurePath

_HUB_CACHE = re.compile(r"models--(?P<org>[^/]+?)--(?P<name>[^/]+)")


def weights_of(model_path: str) -> str:
    """What weights a directory or hub id has: a hub id, also for a directory of the hub's local cache, else
    the directory. Empty when the path is."""
    for part in PurePath(model_path).parts:
        match = _HUB_CACHE.fullmatch(part)
        if match is not None:
            return f"{match['org']}/{match['name']}"
    return model_path


def portable_name(name: str, model_path: str) -> str:
    """What others load a base by: the hub id that it comes from, or else the name it is registered under,
    since a directory of this machine is nothing elsewhere."""
    weights = weights_of(model_path)
    return name if not weights or PurePath(weights).is_absolute() else weights
