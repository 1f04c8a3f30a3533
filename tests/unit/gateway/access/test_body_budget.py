"""Memory of requests: of large ones by shares of their keys, of small ones apart."""

from dataclasses import replace

import pytest

from services.common.contract.errors import Overloaded, TooLarge
from services.gateway.access.body_budget import COPIES, BodyBudget
from services.gateway.access.memory import Memory

KIB = 1024
LARGE = 100 * KIB


def budget(large_requests: int) -> BodyBudget:
    """Room for so many requests of LARGE bytes."""
    return rooms(large_requests * COPIES * LARGE, 1024 * KIB)


def rooms(large: int, small: int) -> BodyBudget:
    return BodyBudget(replace(Memory.of(), requests=large, small_requests=small))


def test_one_keys_large_bodies_leave_room_for_anothers() -> None:
    room = budget(8)
    with room.account("ann") as first, room.account("ann") as second, room.account("ann") as third:
        first.hold(2 * LARGE)
        second.hold(2 * LARGE)
        with pytest.raises(Overloaded, match="--memory-mib"):
            third.hold(LARGE)
        with room.account("bob") as other:
            other.hold(2 * LARGE)
        third.hold(64 * KIB)


def test_small_bodies_need_nothing_of_the_room_for_large_ones() -> None:
    room = budget(2)
    with room.account("ann") as large, room.account("bob") as small:
        large.hold(LARGE)
        small.hold(64 * KIB)
        with pytest.raises(Overloaded):
            small.hold(LARGE)


def test_small_bodies_are_bounded_by_shares_too() -> None:
    room = rooms(COPIES * LARGE, 10 * COPIES * 64 * KIB)
    accounts = [room.account("ann") for _ in range(6)]
    for account in accounts[:5]:
        account.__enter__().hold(64 * KIB)
    with pytest.raises(Overloaded), accounts[5] as one_more:
        one_more.hold(64 * KIB)
    with room.account("bob") as other:
        other.hold(64 * KIB)


def test_a_body_that_grows_is_counted_as_it_is_and_given_back_once() -> None:
    room = budget(2)
    for _ in range(10):
        with room.account("ann") as account:
            for size in range(0, LARGE + 1, KIB):
                account.hold(size)
            account.close()


def test_a_body_that_no_share_can_hold_is_refused_for_good() -> None:
    room = budget(2)
    with room.account("ann") as account:
        account.hold(room.largest)
        with pytest.raises(TooLarge, match="--memory-mib"):
            account.hold(room.largest + 1)


def test_what_does_not_fit_is_refused_before_it_is_received() -> None:
    room = budget(4)
    with room.account("ann") as held, room.account("ann") as next_one:
        held.hold(2 * LARGE)
        with pytest.raises(Overloaded):
            next_one.check(LARGE)
    with room.account("ann") as account:
        account.check(2 * LARGE)
        with room.account("ann") as other:
            other.hold(2 * LARGE)


def test_one_message_of_unknown_size_is_received_however_little_room_there_is() -> None:
    room = budget(1)
    assert room.messages_at_once(1 << 62) == 1
    assert room.messages_at_once(KIB) > 1


def test_what_is_expected_of_a_message_takes_nothing_of_the_room_for_small_ones() -> None:
    room = rooms(COPIES * LARGE, 2 * COPIES * 65 * KIB)
    with room.account("bob") as unknown, room.account("ann") as small:
        unknown.expect(LARGE)
        small.hold(64 * KIB)
        unknown.hold(KIB)
        assert room.used == COPIES * 65 * KIB
