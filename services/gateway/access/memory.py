"""One number for the memory of what a gateway holds in flight, and how its parts divide it.

Invariant: the parts' rooms add up to the number, however many models, samples and clients there are. (What
the process has besides, its code, its connections and caches of small records, is about 200 MB.)
"""

from __future__ import annotations

from dataclasses import dataclass

from services.gateway.access.limits import MIB

DEFAULT_MIB = 2048
LEAST_MIB = 512

RECEIVING_COPIES = 2
"""Memory that a request takes while it is only being received, in times of its bytes: its pieces, and the
whole that they are joined to."""


@dataclass(frozen=True)
class Memory:
    """Rooms in bytes.

    Attributes:
        requests: for requests from when they are received until they are in the journal.
        small_requests: the same for those that are small.
        answers: for answers, until their clients have them.
        receiving: for gRPC messages whose size is not known yet.
        dispatch: for operations that were sent to trainers and are not answered.
        samples: for the requests of samples that wait or run.
        redo: for what was acknowledged just now, and is written again when Redis restarts.
    """

    requests: int
    small_requests: int
    answers: int
    receiving: int
    dispatch: int
    samples: int
    redo: int

    @classmethod
    def of(cls, total: int = DEFAULT_MIB * MIB) -> Memory:
        """The rooms in so many bytes."""
        part = total // 16
        return cls(
            requests=8 * part,
            small_requests=part,
            answers=part,
            receiving=2 * part,
            dispatch=2 * part,
            samples=part,
            redo=part,
        )

    @property
    def largest_message(self) -> int:
        """Bytes of the largest gRPC message that there is room for while its size is not known."""
        return self.receiving // RECEIVING_COPIES
