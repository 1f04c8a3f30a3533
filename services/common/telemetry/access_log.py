"""One line for each request and call that a process answers, where it is asked for.

Invariant: a line names the route or method as the code does, never a path or a query as a client wrote it.
"""

from __future__ import annotations

import logging

from services.common.telemetry import logs, subject

log = logging.getLogger("tinsmith.access")


def write(method: str, route: str, outcome: str, seconds: float) -> None:
    """Writes the line of a call that has ended, about the subject of this task."""
    about = subject.current()
    told: dict[str, str | int | float] = {
        "method": method,
        "route": route,
        "outcome": outcome,
        "seconds": round(seconds, 6),
        "received_bytes": about.received if about else 0,
        "sent_bytes": about.sent if about else 0,
    }
    log.info(
        "%s %s %s in %.1f ms, %d bytes received, %d sent, of %s",
        method,
        route,
        outcome,
        seconds * 1e3,
        told["received_bytes"],
        told["sent_bytes"],
        (about and about.owner) or "nobody known",
        extra=logs.fields(told),
    )
