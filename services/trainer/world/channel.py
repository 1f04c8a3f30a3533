"""How rank 0's commands reach the ranks of a trainer world, and how these agree on what came of them.

Invariant: after each command all ranks know that all came to the same outcome. Commands are msgpack, over a
gloo group of their own also where the engine computes on CUDA.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from services.common.contract.errors import Internal, TinsmithError
from services.trainer.compute.engine import Engine
from services.trainer.compute.memory.failures import (
    OUT_OF_MEMORY,
    LacksMemory,
    is_of_device,
    is_out_of_memory,
)
from services.trainer.world.commands import Command, Shutdown, apply, leaves_others_waiting, refused

log = logging.getLogger(__name__)

_OUTCOME_BYTES = 512


class WorldFailure(Exception):
    """The world cannot go on; the process must exit."""


class Channel:
    """Carries commands and outcomes between the ranks. Blocking; one thread per rank uses it.

    Attributes:
        ranks: of the world.

    Args:
        tell: hears of a lack of memory that the world ends of, before it does.
    """

    def __init__(
        self, world_size: int, timeout: timedelta, tell: Callable[[LacksMemory], None] = lambda lack: None
    ) -> None:
        self.tell = tell
        self.ranks = world_size
        self._group = dist.new_group(backend="gloo", timeout=timeout) if world_size > 1 else None

    def send(self, command: Command) -> None:
        """Rank 0: gives a command to the other ranks."""
        if self._group is None:
            return
        # Into memory that torch takes as it is: a state may be gigabytes.
        msgspec.msgpack.Encoder().encode_into(command, payload := bytearray())
        dist.broadcast(torch.tensor([len(payload)], dtype=torch.int64), 0, self._group)
        dist.broadcast(torch.frombuffer(payload, dtype=torch.uint8), 0, self._group)

    def receive(self) -> Command:
        """Other ranks: the next command."""
        size = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(size, 0, self._group)
        payload = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(payload, 0, self._group)
        return msgspec.msgpack.decode(payload.numpy().data, type=Command)

    def agree(self, error: Exception | None, refused: str = "") -> None:
        """All ranks: compares outcomes; raises this rank's own error when all failed alike.

        Args:
            refused: what was refused of a command that did not fail.

        Raises:
            WorldFailure: the ranks came to different outcomes.
            TinsmithError: the command failed on all ranks; its code tells a lack of memory from all else.
        """
        mine = refused if error is None else f"{type(error).__name__}: {error}"
        outcomes = self._exchange(mine)
        if len({outcome.partition(":")[0] for outcome in outcomes}) > 1:
            raise WorldFailure(f"ranks disagree about a command: {dict(enumerate(outcomes))}") from error
        if isinstance(error, TinsmithError):
            raise error
        if error is not None:
            log.error("a command failed on every rank", exc_info=error)
            raise Internal(mine, OUT_OF_MEMORY if is_out_of_memory(error) else None) from error

    def _exchange(self, outcome: str) -> list[str]:
        if self._group is None:
            return [outcome]
        text = outcome.encode()[:_OUTCOME_BYTES].ljust(_OUTCOME_BYTES, b"\0")
        everyone = [torch.empty(_OUTCOME_BYTES, dtype=torch.uint8) for _ in range(self.ranks)]
        dist.all_gather(everyone, torch.frombuffer(bytearray(text), dtype=torch.uint8), self._group)
        return [tensor.numpy().tobytes().rstrip(b"\0").decode(errors="replace") for tensor in everyone]


def execute(engine: Engine, channel: Channel, command: Command) -> Any:
    """Carries out a command that every rank has and returns this rank's answer.

    Raises:
        TinsmithError: it failed, on all ranks alike.
        WorldFailure: the ranks disagree, or this one cannot go on.
    """
    answer, error = None, None
    try:
        answer = apply(engine, command)
    except Exception as caught:
        if leaves_others_waiting(command, caught, channel.ranks) or is_of_device(caught):
            if isinstance(caught, LacksMemory):
                channel.tell(caught)
            # Others would wait for minutes, if this rank did not end, and its device computes no more.
            raise WorldFailure(f"{type(command).__name__} broke off: {caught!r}") from caught
        error = caught
    channel.agree(error, "" if error is not None else refused(command, answer))
    return answer


def follow(engine: Engine, channel: Channel) -> None:
    """What ranks other than 0 do until they are dismissed."""
    while True:
        command = channel.receive()
        try:
            execute(engine, channel, command)
        except TinsmithError as error:
            log.debug("%s failed: %s", type(command).__name__, error)
        if isinstance(command, Shutdown):
            return
