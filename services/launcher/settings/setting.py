"""One setting of `tinsmith up`.

Invariant: its flag and its variable follow from its name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from services.common.process.flags import Kind


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
