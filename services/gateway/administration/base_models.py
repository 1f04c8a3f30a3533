"""The end of a base model. Invariant: one that a trainer or sampler serves stays."""

from __future__ import annotations

import redis.asyncio

from services.common.contract.errors import Conflict, NotFound
from services.common.state import known_models
from services.common.state.registry import Registry


async def retire(client: redis.asyncio.Redis, name: str) -> None:
    """Retires a base model: what waits for it fails, and new requests for it are refused.

    Raises:
        NotFound: nobody knows the name.
        Conflict: a trainer or sampler of it is alive.
    """
    view = await Registry(client).look("trainer", "sampler")
    if name not in view.base_models:
        known = ", ".join(sorted(view.base_models)) or "none"
        raise NotFound(f"no base model is called {name[:200]!r}; known: {known}")
    live = [record.id for found in view.services.values() for record in found if record.base_model == name]
    if live:
        raise Conflict(
            f"{', '.join(live)} {'serves' if len(live) == 1 else 'serve'} {name}; stop that first "
            "(a process that was killed counts for 10 s)"
        )
    await known_models.retire(client, name)
