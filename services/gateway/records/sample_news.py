"""What gateways tell each other about samples that run, on one channel.

Invariant: every word is an event that changes nothing when it is heard twice.
"""

from __future__ import annotations

import msgspec


class Moved(msgspec.Struct, frozen=True, tag="moved"):
    """A model's inflight sampling sessions answer from this version now, or from a newer one."""

    model_id: str
    version: int


class Kept(msgspec.Struct, frozen=True, tag="kept"):
    """A sample is to end with what it has come to."""

    request_id: str


SampleNews = Moved | Kept
