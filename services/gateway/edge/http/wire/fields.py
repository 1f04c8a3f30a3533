"""Header fields of a request, as its scope has them.

Starlette reads them through a mapping, which takes several times as long; a small request has few that count.
"""

from __future__ import annotations

from starlette.types import Scope


def field_of(scope: Scope, name: bytes) -> str | None:
    """The first header field of a name, which is in lower case; None: there is none."""
    for found, value in scope["headers"]:
        if found == name:
            return str(value, "latin-1")
    return None
