"""Pages of lists over gRPC: the one style of all of them.

Invariant: a page token names a place in a list, not a count of entries, so pages neither repeat nor leave out
what stays while others come and go.
"""

from __future__ import annotations

import math

from services.common.contract.errors import InvalidRequest
from services.gateway.records.listed import Cursor

_PAGE, _MOST = 100, 1000
_MOST_CHARS = 1000


def entries(page_size: int) -> int:
    """Entries of a page.

    Raises:
        InvalidRequest: no page has so many.
    """
    if not 0 <= page_size <= _MOST:
        raise InvalidRequest(f"page_size must be 1 to {_MOST}, not {page_size}", field="page_size")
    return page_size or _PAGE


def cursor_of(token: str) -> Cursor | None:
    """Where the page before ended; None: the first page is asked for.

    Raises:
        InvalidRequest: the token is not one of `token_of`.
    """
    if not token:
        return None
    created_at, _, name = token.partition("/")
    try:
        place = float(created_at)
    except ValueError:
        place = math.nan
    if not math.isfinite(place) or len(token) > _MOST_CHARS:
        message = "page_token is not one of ours; pass next_page_token back as it is"
        raise InvalidRequest(message, field="page_token")
    return Cursor(place, name)


def token_of(cursor: Cursor | None) -> str:
    """For the client to ask for the next page with; empty: there is none."""
    return "" if cursor is None else f"{cursor.created_at!r}/{cursor.name}"
