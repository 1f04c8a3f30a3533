"""Header fields of a request, as its scope has them.

Starlette reads them through a mapping that looks through all of them for each one that is asked for.
"""

from __future__ import annotations

from typing import Any

from starlette.types import Scope

_FIELDS = "tinsmith.fields"


def field_of(scope: Scope, name: bytes) -> str | None:
    """The first header field of a name, which is in lower case; None: there is none."""
    fields: dict[bytes, bytes] | None = scope.get(_FIELDS)
    if fields is None:
        # Of two of a name the first one stays.
        fields = scope[_FIELDS] = dict(reversed(scope["headers"]))
    found = fields.get(name)
    return None if found is None else found.decode("latin-1")


def declares_at_most(size: int, scope: Any) -> bool:
    """Whether a request says that its body has so many bytes at most."""
    declared = field_of(scope, b"content-length") or ""
    return declared.isdigit() and int(declared) <= size
