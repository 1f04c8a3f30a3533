"""An engine of rank 0 and a peer beside it, for worlds without processes."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch

from services.common.contract.errors import TinsmithError
from services.trainer.compute.data import AdamSpec
from services.trainer.compute.full.snapshot import FullSnapshot
from services.trainer.compute.memory.transfer import Copies
from services.trainer.world.channel import Channel
from services.trainer.world.commands import ModelStep

STEP = ModelStep("m", 7, AdamSpec())


class Sizes:
    """Of a base model whose files are read at once."""

    base = 0


class Rank0:
    """An engine whose weights are the number of its steps."""

    sizes = Sizes()

    def __init__(self) -> None:
        self.steps = 0
        self.commands: list[list[str]] = []
        self.refused: dict[str, TinsmithError] = {}

    def optim_steps(self, due: Sequence[tuple[str, AdamSpec]]) -> list[dict[str, float] | TinsmithError]:
        self.steps += len(due)
        self.commands.append([model_id for model_id, _ in due])
        return [self.refused.get(model_id, {"learning_rate": adam.learning_rate}) for model_id, adam in due]

    def drop_model(self, model_id: str) -> None:
        pass

    def gathers(self, model_id: str, *, optimizer: bool) -> bool:
        return False

    def snapshot(self, model_id: str, *, optimizer: bool) -> FullSnapshot:
        return FullSnapshot([], Copies([], torch.device("cpu")), self.steps)


class MortalPeer(Channel):
    """The other rank: it follows until it dies, and rank 0 hears of that when both should agree."""

    def __init__(self) -> None:
        super().__init__(1, timedelta(seconds=1))
        self.dead = False

    def agree(self, error: Exception | None, refused: str = "") -> None:
        if self.dead:
            raise RuntimeError("Connection closed by peer")
        super().agree(error, refused)
