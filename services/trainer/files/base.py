"""Which base model a trainer has: what its files are said to belong to."""

from __future__ import annotations

from dataclasses import dataclass

from services.common.contract.base_weights import portable_name, weights_of
from services.trainer.compute.lora.adapter import HEAD


@dataclass(frozen=True)
class Base:
    """A base model: the name it is registered under, the directory or hub id it comes from, and what it calls
    its output head."""

    name: str
    path: str
    head: str = HEAD

    @property
    def weights(self) -> str:
        """The same for every name of the same weights."""
        return weights_of(self.path)

    @property
    def portable_name(self) -> str:
        """What others, elsewhere, load it by."""
        return portable_name(self.name, self.path)
