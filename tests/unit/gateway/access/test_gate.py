"""How many calls an API key has at once, and how fast it may make them."""

from contextlib import ExitStack

import pytest

from services.common.contract.errors import LimitReached
from services.gateway.access.gate import Gate
from services.gateway.access.limits import OwnerLimits


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def burst(gate: Gate, owner: str) -> int:
    """Calls that an owner can make one right after the other."""
    for count in range(10_000):
        try:
            with gate.call(owner):
                pass
        except LimitReached:
            return count
    raise AssertionError("nothing was refused")


def test_calls_under_way_leave_room_for_other_keys_and_end() -> None:
    gate = Gate(OwnerLimits(calls=8))
    with ExitStack() as under_way:
        for _ in range(4):
            under_way.enter_context(gate.call("ann"))
        with pytest.raises(LimitReached, match="--max-calls"), gate.call("ann"):
            pass
        with gate.call("bob"):
            assert gate.calls == 5
    assert gate.calls == 0
    with gate.call("ann"):
        pass


def test_downloads_are_counted_apart() -> None:
    gate = Gate(OwnerLimits(downloads=2))
    with gate.download("ann"), gate.call("ann"), pytest.raises(LimitReached, match="--max-downloads"):
        gate.download("ann").__enter__()


def test_a_key_may_send_in_bursts_and_over_a_while_at_its_rate() -> None:
    clock = Clock()
    gate = Gate(OwnerLimits(requests_per_second=10, burst_seconds=3), clock)
    assert burst(gate, "ann") == 30
    assert burst(gate, "bob") == 30
    clock.now += 1.55
    assert burst(gate, "ann") == 15
    clock.now += 0.05
    assert burst(gate, "ann") == 1
    clock.now += 1000
    assert burst(gate, "ann") == 30


def test_a_call_that_is_refused_for_its_pace_holds_nothing() -> None:
    gate = Gate(OwnerLimits(requests_per_second=1, burst_seconds=1), Clock())
    with gate.call("ann"):
        pass
    with pytest.raises(LimitReached, match="--requests-per-second"), gate.call("ann"):
        pass
    assert gate.calls == 0


def test_of_keys_that_send_nothing_for_a_burst_nothing_is_kept() -> None:
    clock = Clock()
    gate = Gate(OwnerLimits(requests_per_second=10, burst_seconds=3), clock)
    for number in range(100):
        burst(gate, f"key {number}")
    clock.now += 2
    assert burst(gate, "ann") == 30
    assert len(gate._allowances) == 101
    assert burst(gate, "key 50") == 20
    clock.now += 1
    assert burst(gate, "bob") == 30
    # One that sent again meanwhile keeps what it has left.
    assert set(gate._allowances) == {"ann", "key 50", "bob"}
    assert burst(gate, "key 50") == 10


def test_a_key_that_sends_little_saves_up_no_more_than_a_burst() -> None:
    clock = Clock()
    gate = Gate(OwnerLimits(requests_per_second=10, burst_seconds=3), clock)
    for _ in range(5):
        with gate.call("ann"):
            clock.now += 2.5
    assert burst(gate, "ann") == 30
