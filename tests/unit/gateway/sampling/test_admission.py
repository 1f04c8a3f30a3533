"""How many samples a gateway takes."""

from __future__ import annotations

import pytest

from services.common.contract.errors import Overloaded
from services.gateway.sampling.admission import Admission


def fill(admission: Admission, owner: str, sequences: int = 1, nbytes: int = 1) -> int:
    """Samples that a key gets in until it is told to wait."""
    for count in range(1000):
        try:
            admission.admit(f"{owner}:{count}", owner, sequences, nbytes)
        except Overloaded:
            return count
    raise AssertionError("nothing was refused")


def test_one_key_alone_gets_half_and_another_still_gets_in() -> None:
    admission = Admission(sequences=100, nbytes=10**6)
    assert fill(admission, "ann") == 50
    with pytest.raises(Overloaded):
        admission.check("ann")
    admission.check("bob")
    assert fill(admission, "bob") == 25
    assert fill(admission, "eve") == 12


def test_what_waits_is_known_by_the_class_of_its_owner() -> None:
    admission = Admission(sequences=100, nbytes=1000)
    admission.admit("a", "ann", 8, 1)
    assert (admission.class_of("ann"), admission.by_class()) == ("light", {"light": 8, "heavy": 0})
    admission.admit("b", "bob", 1, 1)
    assert (admission.class_of("ann"), admission.class_of("bob")) == ("heavy", "light")
    assert admission.by_class() == {"light": 1, "heavy": 8}
    admission.release("a")
    assert admission.by_class() == {"light": 1, "heavy": 0}


def test_bytes_are_bounded_like_sequences() -> None:
    admission = Admission(sequences=10**6, nbytes=100)
    assert fill(admission, "ann", nbytes=20) == 2
    assert fill(admission, "bob", nbytes=20) == 1


def test_what_is_larger_than_the_room_is_refused_and_counts_nothing() -> None:
    admission = Admission(sequences=100, nbytes=10**6)
    with pytest.raises(Overloaded, match="sequences"):
        admission.admit("r", "ann", 101, 1)
    assert fill(admission, "ann") == 50


def test_a_sample_that_is_sent_again_counts_once_and_is_let_in_when_all_is_full() -> None:
    admission = Admission(sequences=4, nbytes=10**6)
    assert admission.admit("r", "ann", 2, 1)
    assert not admission.admit("r", "ann", 2, 1)
    with pytest.raises(Overloaded):
        admission.admit("s", "ann", 1, 1)
    admission.release("r")
    admission.release("r")
    assert fill(admission, "ann") == 2


def test_what_was_taken_over_counts_however_much_it_is() -> None:
    admission = Admission(sequences=10, nbytes=10**6)
    for number in range(20):
        admission.hold(f"r{number}", "ann", 1, 1)
    with pytest.raises(Overloaded):
        admission.check("bob")
    for number in range(20):
        admission.release(f"r{number}")
    assert fill(admission, "bob") == 5
