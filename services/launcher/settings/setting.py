"""One setting of `tinsmith up`.

Invariant: its flag and its variable follow from its name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Kind:
    """What a setting takes.

    Attributes:
        says: what it must be, as in "must be ...".
        shown: in place of its value in the help.
        parse: its value; ValueError when it is none.
    """

    says: str
    shown: str
    parse: Callable[[str], Any]


@dataclass(frozen=True)
class Setting:
    """One row.

    Attributes:
        name: as a key of the file; with two dashes, the flag.
        default: None = not set.
    """

    name: str
    kind: Kind
    default: Any
    help: str

    @property
    def flag(self) -> str:
        return f"--{self.name}"

    @property
    def variable(self) -> str:
        return "TINSMITH_" + self.name.upper().replace("-", "_")
