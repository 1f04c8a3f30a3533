"""Memory for request bodies, shared by both edges of a gateway.

Invariant: the bodies that are held at once to be read, parsed and checked stay within one number of bytes.
"""

from __future__ import annotations

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

    def give_back(self, size: int) -> None:
        self._free += size
