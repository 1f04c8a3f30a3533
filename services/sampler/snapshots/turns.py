"""Whose weights are in the engine, and when they change: pure decisions, no clock and no waiting.

One set of base weights is in the engine at a time: the base model's (which adapters need too) or those of one
full snapshot. A request whose weights are in the engine runs at once. When others wait, the running ones
finish on the weights they began with (the engine *drains*), then the weights are swapped.

A request that runs may go on with newer weights of its model, and keep its place in the engine. Once all that
run are to, the weights are replaced under them, by the newest that one of them is to have: an *update*. Until
then each goes on as it is.

Invariants: while weights are replaced nothing runs, and what runs, runs on its own weights. After a
replacement that broke off the base model's weights are the next ones in, once all that ran has left; if they
break off too, nothing runs any more. Nobody starves: weights that others wait for stay at least a turn,
unless nobody uses them, and take on nothing new after it; the next ones are those of the request that has
waited longest. An update begins no turn, and what waits for one while it runs counts among the others. After
an update what runs makes steps for as long as it took, before the next one.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from services.sampler.engine.snapshot_key import SnapshotKey, Weights

SHORTEST_TURN_S = 1.0
TURN_PER_SWAP = 4.0
"""A turn is this many times as long as the swap took, so that at most a fifth of the time goes into swaps."""
IDLE_GRACE_S = 0.05
"""How long unused weights stay within their turn: a client that samples one by one will be back by then
(anticipatory scheduling, Iyer and Druschel 2001)."""


@dataclass(frozen=True)
class Run:
    """These requests may run now."""

    tickets: tuple[int, ...]


@dataclass(frozen=True)
class Swap:
    """Put these weights into the engine, then call `swapped`, `refused`, `broke` or `gave_up`."""

    weights: Weights


@dataclass(frozen=True)
class Update:
    """Put these weights under all that runs, then call `updated`, `refused`, `broke` or `gave_up`."""

    weights: SnapshotKey


@dataclass(frozen=True)
class Wait:
    """Nothing to do before the next event, or before this time."""

    until: float | None = None


class Turns:
    """The requests of one engine. Times are seconds of one monotonic clock.

    Each method is an event; call `decide` after it, until it answers `Wait`.
    """

    def __init__(self, now: float) -> None:
        self._resident: Weights = None
        self._sound = True
        self._lost = False
        self._target: list[Weights] = []
        self._running: set[int] = set()
        self._waiting: OrderedDict[int, Weights] = OrderedDict()
        # Of requests that run and wait for newer weights.
        self._next_of: dict[int, SnapshotKey] = {}
        self._turn_ends = self._rest_ends = now
        self._idle_since = now

    @property
    def resident(self) -> Weights:
        """Weights that are in the engine; of one whose weights are half replaced, those that come next."""
        return self._resident

    @property
    def lost(self) -> bool:
        """Whether the engine has no usable weights and takes none."""
        return self._lost

    @property
    def waiting(self) -> int:
        """Requests that do not run yet."""
        return len(self._waiting)

    @property
    def undecided(self) -> bool:
        """Whether somebody waits, or weights have to be made good."""
        return bool(self._waiting or self._next_of) or not self._sound

    def is_open(self, weights: Weights, now: float) -> bool:
        """Whether a request for them would run at once."""
        if self._target or not self._sound or weights != self._resident:
            return False
        others = any(other != weights for other in self._waiting.values())
        return not self._is_closed(others, now)

    def enter(self, ticket: int, weights: Weights, now: float) -> bool:
        """A new request, which runs at once where it can. Otherwise nothing has happened."""
        opened = self.is_open(weights, now)
        if opened:
            self._running.add(ticket)
        return opened

    def arrive(self, ticket: int, weights: Weights) -> None:
        """A new request."""
        self._waiting[ticket] = weights

    def change(self, ticket: int, weights: SnapshotKey) -> None:
        """A request that runs is to go on with newer weights of its model. It is told with a `Run` that it
        does, with these or newer ones."""
        self._next_of[ticket] = weights

    def leave(self, ticket: int, now: float) -> None:
        """A request is done or given up, whether it ran or not."""
        self._waiting.pop(ticket, None)
        self._next_of.pop(ticket, None)
        if ticket in self._running:
            self._running.remove(ticket)
            self._idle_since = now

    def swapped(self, now: float, seconds: float) -> None:
        """The swap that `decide` asked for is done and took `seconds`."""
        self._resident = self._target.pop()
        self._sound = True
        self._turn_ends = now + max(SHORTEST_TURN_S, TURN_PER_SWAP * seconds)
        self._idle_since = now

    def updated(self, now: float, seconds: float) -> None:
        """The update that `decide` asked for is done and took `seconds`."""
        self._resident = self._target.pop()
        self._rest_ends = now + seconds

    def refused(self, now: float, seconds: float) -> tuple[int, ...]:
        """The weights that `decide` asked for were refused before any were replaced, which took `seconds`.
        Returns the requests that fail with them, or run and go on as they are."""
        target = self._target.pop()
        self._rest_ends = now + seconds
        stay = [ticket for ticket, weights in self._next_of.items() if weights == target]
        for ticket in stay:
            del self._next_of[ticket]
        return (*self._without(target), *stay)

    def broke(self) -> tuple[int, ...]:
        """What `decide` asked for left half of it behind. Returns the requests that waited and fail with it;
        all that runs has to leave."""
        target = self._target.pop()
        # After a first one only the base model's weights are put in.
        self._lost = not self._sound
        self._sound = False
        self._resident = None
        if not self._lost:
            return self._without(target)
        return self._everybody()

    def gave_up(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """What `decide` asked for was given up and may still go on: nothing runs any more, and nobody waits.
        Returns the requests that waited for it, those that ran and were to go on with it, and the others who
        waited."""
        target = self._target.pop()
        self._lost = True
        self._sound = False
        self._resident = None
        ran = tuple(ticket for ticket, weights in self._next_of.items() if weights == target)
        return self._without(target), ran, self._everybody()

    def decide(self, now: float) -> Run | Swap | Update | Wait:
        """What to do now."""
        if self._target or self._lost:
            return Wait()
        if not self._sound:
            return Wait() if self._running else self._swap(None)
        if there := self._there():
            return Run(there)
        if not self._waiting and not self._next_of:
            return Wait()
        mine = tuple(t for t, weights in self._waiting.items() if weights == self._resident)
        others = [weights for weights in self._waiting.values() if weights != self._resident]
        if mine and not self._is_closed(bool(others), now):
            for ticket in mine:
                del self._waiting[ticket]
            self._running.update(mine)
            return Run(mine)
        if self._next_of.keys() >= self._running and self._running:
            return Wait(self._rest_ends) if now < self._rest_ends else self._update()
        if self._running:
            return Wait()
        unused = self._idle_since + IDLE_GRACE_S
        if now < self._turn_ends and now < unused:
            return Wait(min(unused, self._turn_ends))
        return self._swap(others[0])

    def _is_closed(self, others: bool, now: float) -> bool:
        """Whether the weights in the engine take on nothing new: not before their turn is over, nor unless
        others are wanted."""
        return now >= self._turn_ends and (others or bool(self._next_of))

    def _there(self) -> tuple[int, ...]:
        """Who waited for newer weights and has them, or newer ones still; who then waits no more."""
        if not self._next_of or self._resident is None:
            return ()
        version = self._resident.version
        there = tuple(ticket for ticket, weights in self._next_of.items() if weights.version <= version)
        for ticket in there:
            del self._next_of[ticket]
        return there

    def _update(self) -> Update:
        newest = max(self._next_of.values(), key=lambda weights: weights.version)
        self._target.append(newest)
        return Update(newest)

    def _swap(self, weights: Weights) -> Swap:
        self._target.append(weights)
        return Swap(weights)

    def _everybody(self) -> tuple[int, ...]:
        """All who wait, who then wait no more."""
        everybody = tuple(self._waiting)
        self._waiting.clear()
        return everybody

    def _without(self, target: Weights) -> tuple[int, ...]:
        """Those who wait for it, who then wait no more."""
        lost = tuple(ticket for ticket, weights in self._waiting.items() if weights == target)
        for ticket in lost:
            del self._waiting[ticket]
        return lost
