"""Results of a function that are asked for many times in a row, kept within bounds of their memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Generic, TypeVar, TypeVarTuple

Asked = TypeVarTuple("Asked")
T = TypeVar("T")

_MOST_SMALL = 256


class Remembered(Generic[*Asked, T]):
    """What a function makes, also for who asked it the same lately. Of what is large, maybe a megabyte, only
    the last result is kept: it is asked for again within its request, and hardly ever later.

    Thread-safe, though two that ask at once may each have it made.

    Args:
        make: the function. Its arguments are hashable, its results are not changed, what it raises is not
            kept.
    """

    def __init__(self, make: Callable[[*Asked], T]) -> None:
        self._small = lru_cache(maxsize=_MOST_SMALL)(make)
        self._large = lru_cache(maxsize=1)(make)

    def __call__(self, large: bool, *args: *Asked) -> T:
        """The function's result.

        Args:
            large: the arguments, or what is made of them; each time the same of the same arguments.
        """
        return (self._large if large else self._small)(*args)
