"""What memory a world lacked in a pass that its ranks share, told to the world that comes after it.

A rank that has no memory in such a pass leaves the others in a collective, so the world has to end, and as it
was it would end of the same operation again and again. It goes on with micro-batches of half the tokens
instead, and with half of these if that is too much as well. A sequence that does not fit by itself is given
up, alone.

Invariants: a death of which a rank has told is no other operation's; the tokens only become less until a
trainer ends in order, and then the next one begins anew: whoever stopped it may have given it memory.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path

import msgspec

from services.common.process.crashes import Cause
from services.trainer.compute.memory.failures import OUT_OF_MEMORY, LacksMemory

log = logging.getLogger(__name__)


class _Told(msgspec.Struct, omit_defaults=True):
    """What is in the file.

    Attributes:
        tokens: of a micro-batch at most; 0: as many as the trainer is started with.
        died: the world has ended of it, and none has read that yet.
        operation: of the sequence that it ended of; None: there was none that would not fit by itself.
        why: what is to be said of it.
    """

    tokens: int = 0
    died: bool = False
    operation: tuple[str, int] | None = None
    why: str = ""


class Shortage:
    """The file of one trainer, which all of its ranks see. Blocking, for a moment.

    Args:
        run: a directory.
        trainer_id: whose; one world of it at a time uses the file.
    """

    def __init__(self, run: Path, trainer_id: str) -> None:
        self._path = run / f"{trainer_id}.shortage"

    def tell(self, lack: LacksMemory) -> None:
        """Any rank, before it ends of a lack of memory. Where that cannot be written down the world ends like
        one that nothing is known of."""
        try:
            before = self._read().tokens
            tokens = min((each for each in (before, lack.tokens) if each), default=0)
            self._write(_Told(tokens, True, lack.operation, lack.why))
        except OSError as error:
            log.warning("could not tell the next world what this one ends of: %s", error)

    def cause(self) -> Cause[tuple[str, int]] | None:
        """What the last world ended of, if it was that."""
        told = self._read()
        if not told.died:
            return None
        return Cause(told.operation, OUT_OF_MEMORY, told.why)

    def heard(self) -> None:
        """Rank 0, when what the last world ended of is written down elsewhere: another death is another's."""
        told = self._read()
        try:
            if not told.tokens:
                self._path.unlink(missing_ok=True)
            elif told.died:
                # In its place, for which a disk that is full has room. What breaks off there tells nothing.
                with self._path.open("r+b") as file:
                    file.write(msgspec.json.encode(_Told(told.tokens)))
                    file.truncate()
        except OSError as error:
            log.warning("could not write down that it is known what the last world ended of: %s", error)
        for unfinished in self._path.parent.glob(f"{self._path.name}.*"):
            # Of a rank that was killed while it told, or had no room on the disk.
            with suppress(OSError):
                unfinished.unlink()

    def tokens(self, most: int) -> int:
        """Up to which several sequences are computed at once.

        Args:
            most: as many as the trainer is started with.
        """
        tokens = min(self._read().tokens or most, most)
        if tokens < most:
            log.warning(
                "micro-batches have up to %d tokens and not %d, as this trainer ran out of memory; a smaller "
                "--micro-batch-tokens spares the restarts, and after a stop (SIGTERM) it has %d again",
                tokens,
                most,
                most,
            )
        return tokens

    def forget(self) -> None:
        """Rank 0, when the world ends in order."""
        self._path.unlink(missing_ok=True)

    def _read(self) -> _Told:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=_Told)
        except (FileNotFoundError, msgspec.MsgspecError):
            # Nobody told anything that this release understands.
            return _Told()

    def _write(self, told: _Told) -> None:
        """Several ranks may at once, on several machines; one of them is read."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self._path.with_name(f"{self._path.name}.{os.uname().nodename}.{os.getpid()}")
        fresh.write_bytes(msgspec.json.encode(told))
        fresh.replace(self._path)
