"""Every kind of fault the suite knows, by the words of the table."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.common.process import failpoints
from services.common.process.faults import armed
from tests.robustness.proxy import Wire
from tests.robustness.world import World

Inject = Callable[[World, random.Random], None]

PAST_LEASE_S = 8.0
"""Longer than a dispatch lease (6 s)."""
PAST_RECORD_S = 13.0
"""Longer than a service's record (10 s)."""
OUT_OF_MEMORY = "trainer: out of memory at trainer.mid_batch"
"""Micro-batches are of one datum, so it is its operation that fails, and nothing else may."""
_TROUBLE_S = 3.0
_BLOCKED_S = 20.0
"""Longer than the deadline of a broadcast."""


@dataclass(frozen=True)
class Fault:
    """One kind.

    Attributes:
        part: whom it hits; kinds of different parts are mixed.
        inject: returns when it has happened.
        ranks: trainer ranks it needs.
        amid: whether it can also strike while a trainer is away: it needs none to happen, and what it
            takes away together with one is not promised to be kept otherwise.
    """

    name: str
    part: str
    inject: Inject
    ranks: int = 1
    amid: bool = False


def _signal(kind: str, number: signal.Signals) -> Inject:
    def inject(world: World, chance: random.Random) -> None:
        world.send(_any(world, kind), number)

    return inject


def _any(world: World, kind: str) -> str:
    return world.any_of(kind) if kind in ("gateway", "sampler") else kind


def _stop(kind: str, seconds: float) -> Inject:
    return lambda world, chance: world.stop(_any(world, kind), seconds)


def _point(point: str, action: str) -> Inject:
    return lambda world, chance: world.fail_at(point, action)


def _wire(which: str, begin: Callable[[Wire], None], seconds: float = _TROUBLE_S) -> Inject:
    def inject(world: World, chance: random.Random) -> None:
        wire: Wire = getattr(world, which)
        with world.trouble(wire, seconds, lambda: begin(wire)):
            pass

    return inject


def _slow(wire: Wire) -> None:
    wire.delay = 0.3


def _half_open(wire: Wire) -> None:
    wire.to_client = False


def _black_hole(wire: Wire) -> None:
    wire.to_client = wire.to_server = False


def _lease_taken(world: World, chance: random.Random) -> None:
    """The gateway that takes a model over is killed too."""
    armed.arm(world.failpoints, "gateway.lease_taken", "kill")
    world.send("gateway-0", signal.SIGKILL)
    world.send("gateway-1", signal.SIGTERM)
    world.wait_fired("gateway.lease_taken")


def _mid_restore(world: World, chance: random.Random) -> None:
    """The trainer that brings models back is killed too."""
    armed.arm(world.failpoints, "trainer.mid_restore", "kill")
    world.send("trainer-0", signal.SIGKILL)
    world.wait_fired("trainer.mid_restore")


def _every_sampler(world: World, chance: random.Random) -> None:
    for name in ("sampler-0", "sampler-1"):
        world.wait_ready(name)
    for name in ("sampler-0", "sampler-1"):
        world.send(name, signal.SIGKILL)


def _redis_always(world: World, chance: random.Random) -> None:
    world.redis.sync_always(True)
    world.redis.kill(0.2)


def _all_faults() -> list[Fault]:
    found = [
        Fault("gateway: SIGKILL", "gateway", _signal("gateway", signal.SIGKILL), amid=True),
        Fault("gateway: SIGTERM", "gateway", _signal("gateway", signal.SIGTERM), amid=True),
        Fault(
            "gateway: SIGSTOP past its leases, then SIGCONT",
            "gateway",
            _stop("gateway", PAST_LEASE_S),
            amid=True,
        ),
        Fault("gateway: killed at gateway.lease_taken", "gateway", _lease_taken),
        Fault("trainer: SIGKILL of rank 0", "trainer", _signal("trainer-0", signal.SIGKILL)),
        Fault("trainer: killed, and again at trainer.mid_restore", "trainer", _mid_restore),
        Fault("trainer: SIGKILL of rank 1", "trainer", _signal("trainer-1", signal.SIGKILL), ranks=2),
        Fault("trainer: SIGTERM", "trainer", _signal("trainer-0", signal.SIGTERM)),
        Fault("trainer: SIGSTOP past its record, then SIGCONT", "trainer", _stop("trainer-0", PAST_RECORD_S)),
        Fault(
            "trainer: SIGSTOP of rank 1, then SIGCONT", "trainer", _stop("trainer-1", PAST_RECORD_S), ranks=2
        ),
        Fault(
            "trainer: error at trainer.before_pass_reply",
            "trainer",
            _point("trainer.before_pass_reply", "error"),
        ),
        Fault(OUT_OF_MEMORY, "trainer", _point("trainer.mid_batch", "oom")),
        Fault(
            "trainer: the device fails at trainer.mid_batch",
            "trainer",
            _point("trainer.mid_batch", "device"),
        ),
        Fault(
            "trainer: stopped at trainer.mid_broadcast", "trainer", _point("trainer.mid_broadcast", "stop:15")
        ),
        Fault("sampler: SIGKILL", "sampler", _signal("sampler", signal.SIGKILL), amid=True),
        Fault("sampler: SIGKILL of all", "sampler", _every_sampler),
        Fault("sampler: SIGKILL of its engine", "sampler", lambda w, c: w.kill_engine(w.any_of("sampler"))),
        Fault("sampler: SIGTERM", "sampler", _signal("sampler", signal.SIGTERM), amid=True),
        Fault("sampler: SIGSTOP past its record, then SIGCONT", "sampler", _stop("sampler", PAST_RECORD_S)),
        Fault(
            "sampler: engine stopped at sampler.mid_receive",
            "sampler",
            _point("sampler.mid_receive", f"stop:{_BLOCKED_S}"),
        ),
        Fault("Redis: SIGKILL, everysec", "redis", lambda w, c: w.redis.kill(0.2), amid=True),
        Fault("Redis: SIGKILL, always", "redis", _redis_always, amid=True),
        Fault(
            "Redis: power cut, everysec (its last 0.9 s lost)",
            "redis",
            lambda w, c: w.redis.cut_power(0.9, 0.2),
        ),
        Fault("Redis: away for 10 s", "redis", lambda w, c: w.redis.kill(10.0)),
        Fault("Redis: SIGSTOP for 8 s", "redis", lambda w, c: w.redis.pause(PAST_LEASE_S), amid=True),
    ]
    for which, words in (
        ("sdk", "SDK and gateway"),
        ("state", "services and Redis"),
        ("services", "gateway, trainer and samplers"),
    ):
        found += [
            Fault(f"between {words}: reset", which, _wire(which, lambda wire: None, 0.0), amid=True),
            Fault(f"between {words}: 0.3 s slower", which, _wire(which, _slow), amid=True),
            Fault(f"between {words}: half-open", which, _wire(which, _half_open), amid=True),
            Fault(f"between {words}: black hole", which, _wire(which, _black_hole, PAST_LEASE_S), amid=True),
        ]
    for point in failpoints.POINTS:
        part = point.partition(".")[0]
        if point not in ("gateway.lease_taken", "trainer.mid_restore", *_UNREACHED):
            action = "kill:0.05" if point == "sampler.mid_generation" else "kill"
            amid = point in _AMID_POINTS
            found.append(Fault(f"{part}: killed at {point}", part, _point(point, action), amid=amid))
    for point in ("trainer.before_pass", "trainer.after_pass", "trainer.mid_step", "trainer.after_step"):
        found.append(
            Fault(
                f"trainer: rank 1 killed at {point}",
                "trainer",
                _point(f"{point}[trainer-1]", "kill"),
                ranks=2,
            )
        )
    return found


_UNREACHED = ("trainer.mid_split", "trainer.before_return")
"""Points that this world never comes to: no sequence is longer than one rank holds, and adapters that are
idle leave a GPU only. Components' tests break off there."""
_AMID_POINTS = (
    "gateway.after_accept_sample",
    "gateway.before_publish_sample",
    "sampler.mid_generation",
    "sampler.before_reply",
)
ALL = {fault.name: fault for fault in _all_faults()}
SHORT = (
    "gateway: killed at gateway.after_accept",
    "trainer: killed at trainer.mid_step",
    "sampler: SIGKILL",
    "between services and Redis: reset",
    "gateway: SIGSTOP past its leases, then SIGCONT",
    "Redis: SIGKILL, everysec",
    "trainer: killed at trainer.before_pointer",
    "between SDK and gateway: half-open",
    "sampler: SIGKILL of all",
    "gateway: killed at gateway.before_publish",
    OUT_OF_MEMORY,
    "trainer: the device fails at trainer.mid_batch",
    "between gateway, trainer and samplers: reset",
)


def mixed(faults: Sequence[Fault], chance: random.Random) -> list[Fault]:
    """The faults in random order, those of one part spread over the whole."""
    by_part: dict[str, list[Fault]] = {}
    for fault in faults:
        by_part.setdefault(fault.part, []).append(fault)
    placed = []
    for group in by_part.values():
        chance.shuffle(group)
        placed += [((index + chance.random()) / len(group), fault) for index, fault in enumerate(group)]
    return [fault for _, fault in sorted(placed, key=lambda one: one[0])]


def grouped(faults: Sequence[Fault], amid: int, chance: random.Random) -> list[list[Fault]]:
    """Every fault alone, but each trainer's followed by so many of those that can strike amid it.

    Those are taken in turn, each as often as the others.
    """
    strikers: list[Fault] = []
    groups = []
    for fault in faults:
        group = [fault]
        while fault.part == "trainer" and len(group) <= amid:
            if not strikers:
                strikers = [one for one in ALL.values() if one.amid]
                chance.shuffle(strikers)
            group.append(strikers.pop())
        groups.append(group)
    return groups
