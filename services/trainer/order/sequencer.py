"""The order of one model's operations.

Invariant: operations become ready in seq_id order, each exactly once and not before the predecessor that
its caller names; one that was admitted before is never admitted again, its caller gets the running
operation or the kept result instead, and nobody those of another operation. Pure: no clock, no I/O, no
event loop.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from services.common.contract.errors import (
    Internal,
    InvalidRequest,
    ModelNotResident,
    Overloaded,
    StaleEpoch,
)

OpT = TypeVar("OpT")
ResultT = TypeVar("ResultT")

KEPT_RESULTS = 64
KEPT_BYTES = 64 * 1024**2
"""Results are far smaller than requests, so this is more than those have whose results are not stored yet: a
gateway has at most 128 MiB of one model's requests under way (`DispatchSettings.window`)."""
MAX_WAITING = 256


@dataclass(frozen=True)
class Executed(Generic[ResultT]):
    """The operation ran before, to this result."""

    result: ResultT


@dataclass(frozen=True)
class Running(Generic[OpT]):
    """The operation is admitted already and has no result yet."""

    operation: OpT


class Sequence(Generic[OpT, ResultT]):
    """Order, duplicates and fencing of one model.

    Attributes:
        applied: seq_id of the last executed operation; -1 before the first.
        epoch: highest fencing epoch seen.
        ready: operations in order, not executed yet.
        unfinished: seq_id -> operation admitted and without a result (ready, held early, executing).
        results: seq_id -> result of the last executed operations, oldest first; kept_bytes: of all of them.
        strayed: another operation has a number by now under which one was admitted here: Redis lost what was
            acknowledged last, and this is not what the journal comes to any more.

    Args:
        size_of: bytes of a result.
    """

    def __init__(self, applied: int = -1, size_of: Callable[[ResultT], int] = lambda _: 0) -> None:
        self.applied = applied
        self._size_of = size_of
        self.kept_bytes = 0
        self.epoch = 0
        self.ready: deque[OpT] = deque()
        self.unfinished: dict[int, OpT] = {}
        self.results: OrderedDict[int, ResultT] = OrderedDict()
        self._ended: deque[int] = deque()
        """Of the last operations, whether their results are kept or were forgotten."""
        self.strayed = False
        self._tail = applied
        self._accepted_at: dict[int, float] = {}
        """seq_id -> when the operation was accepted, of those that were admitted here and are remembered"""
        self._early: dict[int, tuple[int, OpT]] = {}
        """seq_id -> (predecessor, operation)"""

    def fence(self, epoch: int) -> None:
        """Notes a caller's epoch.

        Raises:
            StaleEpoch: a higher one was seen.
        """
        if epoch < self.epoch:
            raise StaleEpoch(
                f"epoch {epoch} was superseded by {self.epoch}; another gateway leads this model"
            )
        self.epoch = epoch

    def find(
        self, seq_id: int, after: int, accepted_at: float = 0.0
    ) -> Executed[ResultT] | Running[OpT] | None:
        """What is known of an operation; None when it is to be admitted now.

        Args:
            accepted_at: tells it from another one under its number; 0 = that is not known.

        Raises:
            ModelNotResident: it is another one, so the model is to be brought back as the journal has it.
            Internal: it ran so long ago that its result is no longer kept.
            InvalidRequest: it names a predecessor that is not before it.
            Overloaded: too many operations wait.
        """
        if accepted_at and self._accepted_at.get(seq_id, 0.0) not in (0.0, accepted_at):
            self.strayed = True
        if self.strayed:
            raise ModelNotResident("the model has executed what its journal does not have any more")
        if seq_id in self.results:
            return Executed(self.results[seq_id])
        if seq_id in self.unfinished:
            return Running(self.unfinished[seq_id])
        if seq_id <= self._tail:
            raise Internal(
                f"operation {seq_id} was executed, but its result is no longer kept", "result_lost"
            )
        if after >= seq_id:
            raise InvalidRequest(f"operation {seq_id} cannot follow {after}")
        waiting = len(self.ready) if self.is_next(after) else len(self._early)
        if waiting >= MAX_WAITING:
            raise Overloaded(f"{waiting} operations of this model are waiting; try again later")
        return None

    def admit(self, seq_id: int, after: int, operation: OpT, accepted_at: float = 0.0) -> None:
        """Takes in an operation that `find` knew nothing of."""
        self._accepted_at[seq_id] = accepted_at
        self.unfinished[seq_id] = operation
        self._early[seq_id] = (after, operation)
        while self._early:
            lowest = min(self._early)
            if not self.is_next(self._early[lowest][0]):
                return
            self._tail = lowest
            self.ready.append(self._early.pop(lowest)[1])

    def is_next(self, after: int) -> bool:
        """Whether an operation with this predecessor need not wait for another to arrive.

        The model may be further than the caller knows: a caller that took over leaves out operations which
        a replay may pass over, though this model has executed them.
        """
        return after <= self._tail

    def is_behind(self, seq_id: int) -> bool:
        """Whether an operation was executed elsewhere that did not get here in order."""
        return seq_id > self._tail

    def executed(self, seq_id: int) -> OpT:
        """The head of `ready` has run (its result may follow later). Returns and removes it."""
        operation = self.ready.popleft()
        self.applied = seq_id
        return operation

    def finish(self, seq_id: int, result: ResultT) -> None:
        """Keeps the result of an executed operation (that may be given up) for those who send it again."""
        self.unfinished.pop(seq_id, None)
        self._keep(seq_id, result)

    def give_up(self) -> list[OpT]:
        """Forgets what has no result, and returns it; the sequence is not used any more."""
        given_up = list(self.unfinished.values())
        self.unfinished.clear()
        return given_up

    def restore_results(self, results: Mapping[int, ResultT]) -> None:
        """Results of operations up to `applied`, kept by an earlier process."""
        for seq_id, result in sorted(results.items()):
            self._keep(seq_id, result)

    def forget(self, before: int) -> int:
        """Forgets results of operations before a seq_id which nobody needs any more, but for the last of all;
        their bytes. What else is known of those operations stays."""
        kept = self.kept_bytes
        for seq_id in list(self.results)[:-1]:
            if seq_id < before:
                self._drop(seq_id)
        return kept - self.kept_bytes

    def _keep(self, seq_id: int, result: ResultT) -> None:
        self.results[seq_id] = result
        self.kept_bytes += self._size_of(result)
        self._ended.append(seq_id)
        while len(self._ended) > 1 and (len(self._ended) > KEPT_RESULTS or self.kept_bytes > KEPT_BYTES):
            oldest = self._ended.popleft()
            self._accepted_at.pop(oldest, None)
            self._drop(oldest)

    def _drop(self, seq_id: int) -> None:
        result = self.results.pop(seq_id, None)
        if result is not None:
            self.kept_bytes -= self._size_of(result)
