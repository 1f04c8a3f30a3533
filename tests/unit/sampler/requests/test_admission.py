"""How much a sampler takes on, and what it refuses at once."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from services.common.contract.errors import Overloaded
from services.sampler.requests.admission import GROUP_S, Admission, Capacity

CAPACITY = Capacity(sequences=64, queued=16)


@pytest.fixture
def admission() -> Admission:
    return Admission(CAPACITY)


@pytest.fixture
def held() -> ExitStack:
    return ExitStack()


def take(admission: Admission, held: ExitStack, sequences: int, *, ready: bool = True, late: int = 0) -> None:
    place = held.enter_context(admission.place(sequences, ready, late))
    if ready:
        place.enter()


def test_an_engine_gets_a_quarter_more_than_it_generates_at_once_so_that_it_never_runs_dry() -> None:
    assert [Capacity.of(sequences).queued for sequences in (1, 64, 128, 1024)] == [16, 16, 32, 256]


def test_what_exceeds_the_engine_and_its_small_queue_is_refused_at_once_and_fits_when_others_end(
    admission: Admission, held: ExitStack
) -> None:
    with admission.place(20, True, 0):
        take(admission, held, 60)
        with pytest.raises(Overloaded, match="80 sequences, of at most 80, and no room for 1 more"):
            take(admission, held, 1)
    take(admission, held, 20)
    assert admission.taken == 80


def test_what_waits_for_its_weights_leaves_room_for_what_can_run(
    admission: Admission, held: ExitStack
) -> None:
    take(admission, held, 10, ready=False)
    take(admission, held, 6, ready=False)
    with pytest.raises(Overloaded, match="16 sequences wait for other weights"):
        take(admission, held, 1, ready=False)
    take(admission, held, 64)


def test_a_request_that_is_larger_than_the_queue_may_wait_for_its_weights_alone(
    admission: Admission, held: ExitStack
) -> None:
    take(admission, held, 64, ready=False)
    with pytest.raises(Overloaded, match="other weights"):
        take(admission, held, 1, ready=False)


def test_a_group_that_is_larger_than_the_queue_waits_for_its_weights_beside_single_ones_that_always_do(
    admission: Admission, held: ExitStack
) -> None:
    for _ in range(15):
        take(admission, held, 1, ready=False)
    with admission.place(48, False, 0), pytest.raises(Overloaded, match="63 sequences wait"):
        take(admission, held, 1, ready=False)
    take(admission, held, 1, ready=False)


def test_what_enters_the_engine_waits_no_more(admission: Admission, held: ExitStack) -> None:
    with admission.place(16, False, 0) as place:
        place.enter()
        assert (admission.taken, admission.waiting) == (16, 0)
        take(admission, held, 16, ready=False)
    assert (admission.taken, admission.waiting) == (16, 16)


def test_while_the_engine_does_not_get_round_to_what_it_has_more_is_refused(
    admission: Admission, held: ExitStack
) -> None:
    take(admission, held, 1, late=16)
    with pytest.raises(Overloaded, match="has not begun with 17"):
        take(admission, held, 1, late=17)


def test_whatever_ends_a_request_it_holds_nothing_afterwards(admission: Admission) -> None:
    for entered in (False, True):
        with pytest.raises(RuntimeError), admission.place(5, False, 0) as place:
            if entered:
                place.enter()
            raise RuntimeError("the engine died")
    assert (admission.taken, admission.waiting) == (0, 0)


def test_a_request_that_is_larger_than_the_engine_is_taken_on_when_that_is_not_full() -> None:
    admission = Admission(Capacity(sequences=8, queued=2))
    with admission.place(512, ready=True, late=0):
        assert admission.taken == 512
        with pytest.raises(Overloaded, match="of at most 10"), admission.place(1, ready=True, late=0):
            pass
    with admission.place(8, ready=True, late=0), pytest.raises(Overloaded):
        admission.place(512, ready=True, late=0).__enter__()


def test_a_group_of_many_samples_finds_its_places_beside_single_ones_that_come_all_the_time() -> None:
    """A gateway sends it once its samples have places in all replicas together: not in one of them."""
    admission = Admission(Capacity.of(64))
    with ExitStack() as singles:
        for _ in range(63):
            singles.enter_context(admission.place(1, ready=True, late=0))
        with admission.place(64, ready=True, late=0), pytest.raises(Overloaded):
            admission.place(64, ready=True, late=0).__enter__()


def test_a_group_that_was_turned_away_finds_its_places_whoever_else_keeps_the_engine_full() -> None:
    """As another gateway does, which does not know of the group."""
    now = 0.0
    admission = Admission(CAPACITY, lambda: now)
    singles: list[ExitStack] = []

    def single() -> bool:
        place = ExitStack()
        try:
            place.enter_context(admission.place(1, ready=True, late=0))
        except Overloaded:
            return False
        singles.append(place)
        return True

    def fill() -> None:
        while single():
            pass

    fill()
    assert admission.taken == 80
    with pytest.raises(Overloaded):
        admission.place(64, ready=True, late=0).__enter__()
    for _ in range(17):
        singles.pop().close()
        fill()
    assert admission.taken == 63
    with admission.place(64, ready=True, late=0):
        assert admission.taken == 127
    # Nobody waits any more, and the engine never runs dry.
    fill()
    assert admission.taken == 80


def test_a_group_that_does_not_come_again_keeps_nobody_out_for_long() -> None:
    now = 0.0
    admission = Admission(CAPACITY, lambda: now)
    with ExitStack() as taken:
        for _ in range(64):
            taken.enter_context(admission.place(1, ready=True, late=0))
        with pytest.raises(Overloaded):
            admission.place(17, ready=True, late=0).__enter__()
        with pytest.raises(Overloaded):
            admission.place(1, ready=True, late=0).__enter__()
        now = GROUP_S
        taken.enter_context(admission.place(1, ready=True, late=0))


def test_groups_that_come_all_the_time_keep_no_single_sample_out() -> None:
    now = 0.0
    admission = Admission(CAPACITY, lambda: now)
    with ExitStack() as first:
        first.enter_context(admission.place(64, ready=True, late=0))
        with ExitStack() as second:
            for _ in range(16):
                second.enter_context(admission.place(1, ready=True, late=0))
            with pytest.raises(Overloaded):
                admission.place(64, ready=True, late=0).__enter__()
            first.close()
            second.enter_context(admission.place(64, ready=True, late=0))
            # The next group is turned away before a single sample has had its turn: nothing is kept for it.
            with pytest.raises(Overloaded):
                admission.place(64, ready=True, late=0).__enter__()
            held = second.pop_all()
        with held, ExitStack() as single:
            admission.taken -= 10
            single.enter_context(admission.place(1, ready=True, late=0))
            with pytest.raises(Overloaded):
                admission.place(64, ready=True, late=0).__enter__()
            # Now it is the group's turn again.
            with pytest.raises(Overloaded):
                admission.place(1, ready=True, late=0).__enter__()
            admission.taken += 10
