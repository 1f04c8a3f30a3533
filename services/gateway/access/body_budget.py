"""Memory for request bodies, shared by both edges of a gateway.

Invariant: the bodies that are held at once to be read, parsed and checked stay within one number of bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from services.common.contract.errors import Overloaded


class BodyBudget:
    """Bytes of request bodies that one process holds at once."""

    def __init__(self, capacity: int) -> None:
        self._free = capacity

    def take(self, size: int) -> None:
        """Reserves bytes.

        Raises:
            Overloaded: there are not as many left.
        """
        if size > self._free:
            raise Overloaded(
                "this gateway holds too many large requests at the moment; try again in a second"
            )
        self._free -= size

    @contextmanager
    def held(self, size: int) -> Iterator[None]:
        """Bytes that are held until the context ends. Raises as `take`."""
        self.take(size)
        try:
            yield
        finally:
            self.give_back(size)

    def give_back(self, size: int) -> None:
        self._free += size
