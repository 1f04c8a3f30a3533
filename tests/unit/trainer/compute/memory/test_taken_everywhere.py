"""Memory that all ranks take before they begin, or none. What the other ranks say stands in for them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from services.trainer.compute.memory import room


class Memory:
    """Has so many tries refused before there is some."""

    def __init__(self, refuses: int = 0, error: Exception | None = None) -> None:
        self.refuses, self.error = refuses, error or MemoryError()
        self.taken, self.given_back = False, 0

    def take(self) -> None:
        if self.refuses:
            self.refuses -= 1
            raise self.error
        self.taken = True

    def give_back(self) -> None:
        self.taken, self.given_back = False, self.given_back + 1


def taken(memory: Memory, monkeypatch: pytest.MonkeyPatch, others_lack: bool = False) -> bool:
    def any_rank(flags: Sequence[bool], device: str) -> list[bool]:
        return [flag or others_lack for flag in flags]

    monkeypatch.setattr(room, "any_rank", any_rank)
    return room.taken_everywhere(memory.take, memory.give_back, "cpu")


def test_what_all_ranks_have_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory()
    assert taken(memory, monkeypatch)
    assert (memory.taken, memory.given_back) == (True, 0)


def test_one_that_finds_none_lets_go_of_what_it_keeps_and_tries_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = Memory(refuses=1)
    assert taken(memory, monkeypatch)
    assert (memory.taken, memory.given_back) == (True, 1)


def test_one_that_finds_none_twice_has_none_and_says_what_was_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    memory = Memory(2, MemoryError("no page-locked memory"))
    assert not taken(memory, monkeypatch)
    assert (memory.taken, memory.given_back) == (False, 2)
    assert "no page-locked memory" in caplog.text


def test_what_another_rank_lacks_is_given_back_to_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, freed = Memory(), list[bool]()
    monkeypatch.setattr(room, "free_cache", lambda: freed.append(memory.taken))
    assert not taken(memory, monkeypatch, others_lack=True)
    assert (memory.taken, memory.given_back, freed) == (False, 1, [False])


def test_another_error_is_no_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="something else"):
        taken(Memory(1, ValueError("something else")), monkeypatch)
