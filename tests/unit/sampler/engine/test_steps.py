"""A grammar that keeps a step is given up, and nothing waits for it or asks it anything any more."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar, StructuredOutputOptions

from services.common.contract.errors import InvalidRequest, Overloaded
from services.sampler.engine import answers
from services.sampler.engine.grammars import core
from services.sampler.engine.grammars import steps as module
from services.sampler.engine.grammars.steps import TOO_SLOW, Busy, Steps, is_unambiguous
from services.sampler.engine.sampling import Constraint

ALLOWED, ANY = 0b1010, -1
JSON, REGEX = StructuredOutputOptions.JSON, StructuredOutputOptions.REGEX
A, B = (REGEX, "a"), (REGEX, "b")


class Grammar(StructuredOutputGrammar):
    """Takes as long as `over` is not set for what it is told to take long for."""

    def __init__(self, slow: str = "") -> None:
        self.over = threading.Event()
        self.slow, self.asked = slow, list[str]()

    def _take(self, what: str) -> None:
        self.asked.append(what)
        if what == self.slow:
            self.over.wait(60)

    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
        self._take("fill")
        bitmask[batch_index].fill_(ALLOWED)

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        self._take("accept")
        return tokens != [9]

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        self._take("validate")
        return tokens[:1]

    def rollback(self, num_tokens: int) -> None:
        self._take("rollback")

    def is_terminated(self) -> bool:
        return False

    def reset(self) -> None:
        self._take("reset")


def test_a_grammar_that_keeps_to_its_time_says_what_it_says() -> None:
    own = Grammar()
    grammar, masks = Steps(30).bounded(A, own), torch.zeros(3, 2, dtype=torch.int32)
    grammar.fill_bitmask(masks, 1)
    assert masks.tolist() == [[0, 0], [ALLOWED] * 2, [0, 0]]
    assert [grammar.accept_tokens("r", tokens) for tokens in ([1], [9])] == [True, False]
    assert grammar.validate_tokens([1, 2]) == [1]
    grammar.rollback(1)
    assert not grammar.slow
    assert own.asked == ["fill", "accept", "accept", "validate", "rollback"]


@pytest.mark.parametrize("slow", ["fill", "accept", "validate"])
def test_what_takes_too_long_is_given_up_with_all_of_its_constraint_and_no_other(slow: str) -> None:
    steps, masks = Steps(1.0), torch.zeros(1, 2, dtype=torch.int32)
    own = Grammar(slow)
    grammar, twin, other = steps.bounded(A, own), steps.bounded(A, Grammar()), Grammar()
    began = time.monotonic()
    try:
        for _ in range(5):
            grammar.validate_tokens([1])
            grammar.fill_bitmask(masks, 0)
            assert grammar.accept_tokens("r", [1]) is False
        assert time.monotonic() - began < 4
        assert masks.tolist() == [[ANY, ANY]]
        # Its own mask is another one.
        own.over.set()
        time.sleep(0.1)
        assert masks.tolist() == [[ANY, ANY]]
    finally:
        own.over.set()
    assert own.asked.count(slow) == 1
    del grammar, twin
    later = Grammar()
    assert not steps.bounded(A, later).accept_tokens("r", [1])
    assert later.asked == []
    assert steps.bounded(B, other).accept_tokens("r", [1])


def test_grammars_that_together_take_too_long_for_a_step_are_given_up() -> None:
    class Slow(Grammar):
        def _take(self, what: str) -> None:
            time.sleep(0.6)

    steps = Steps(30, together=1.5)
    quick = steps.bounded((REGEX, "quick"), Grammar())
    several = [steps.bounded((REGEX, str(number)), Slow()) for number in range(6)]
    for each in several[:2]:
        assert each.accept_tokens("r", [1])
    steps.begin()
    assert [each.accept_tokens("r", [1]) for each in several] == [True, True, *[False] * 4]
    assert quick.accept_tokens("r", [1])
    # Those of the others' constraints are not: they had no time of their own.
    steps.begin()
    assert [each.accept_tokens("r", [1]) for each in several[2:]] == [False] * 4
    assert steps.bounded((REGEX, "5"), Grammar()).accept_tokens("r", [1])


def test_a_constraint_is_tried_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    own, steps = Grammar("accept"), Steps(0.5)
    grammar = steps.bounded(A, own)
    assert not grammar.accept_tokens("r", [1])
    own.over.set()
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 590)
    assert not steps.bounded(A, Grammar()).accept_tokens("r", [1])
    monkeypatch.setattr(time, "monotonic", lambda: now + 610)
    assert steps.bounded(A, Grammar()).accept_tokens("r", [1])
    # Its thread may be at it yet.
    assert not grammar.accept_tokens("r", [1])


def test_a_grammar_that_nothing_makes_ambiguous_is_asked_by_who_wants_to_know_until_it_takes_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Told(Grammar):
        def _take(self, what: str) -> None:
            nonlocal now
            threads.append(threading.current_thread())
            now += 0.1 if what == "accept" else 0

    now, threads = 0.0, list[threading.Thread]()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    grammar = Steps(30).bounded((JSON, '{"type": "integer"}'), Told())
    for _ in range(2):
        grammar.validate_tokens([1])
        assert grammar.accept_tokens("r", [1])
    own = threading.current_thread()
    assert [thread is own for thread in threads] == [True, True, False, False]


@pytest.mark.parametrize(
    ("constraint", "unambiguous"),
    [
        ((REGEX, "a"), False),
        ((StructuredOutputOptions.JSON_OBJECT, ""), False),
        ((JSON, "true"), True),
        ((JSON, '{"type": "object", "properties": {"a": {"type": "array", "items": {}}}}'), True),
        ((JSON, '{"properties": {"a": {"enum": [1, {"b": 2}]}}}'), True),
        ((JSON, '{"properties": {"a": {"type": "string", "\\u0070attern": "(a*)*"}}}'), False),
        ((JSON, '{"items": [{"anyOf": [{}, {}]}]}'), False),
    ],
)
def test_a_schema_is_unambiguous_without_choices_and_patterns(
    constraint: tuple[StructuredOutputOptions, str], unambiguous: bool
) -> None:
    assert is_unambiguous(constraint) is unambiguous


def test_a_sequence_that_ends_so_says_why() -> None:
    own = Grammar("accept")
    grammar = Steps(0.1).bounded(A, own)
    asked = SimpleNamespace(structured_output_request=SimpleNamespace(grammar=grammar), stop_reason=None)

    class Manager:
        def grammar_init(self, request: Any) -> None: ...

        def grammar_bitmask(self) -> None: ...

        def accept_tokens(self, request: Any, tokens: list[int]) -> bool:
            return bool(request.structured_output_request.grammar.accept_tokens("r", tokens))

    manager: Any = Manager()
    manager.executor = ThreadPoolExecutor(1)
    core.install(SimpleNamespace(structured_output_manager=manager, update_from_output=None), seconds=1)
    assert not manager.accept_tokens(asked, [1])
    own.over.set()
    assert asked.stop_reason == TOO_SLOW
    completion: Any = SimpleNamespace(token_ids=[1], stop_reason=asked.stop_reason)
    error = answers._unmatched(Constraint("regex", "a"), (), completion)
    assert isinstance(error, InvalidRequest)
    assert (error.code, "at token 1" in error.message) == ("constraint_too_large", True)


def test_threads_of_what_was_given_up_come_after_all_others_and_are_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Told(Grammar):
        def _take(self, what: str) -> None:
            threads.append(threading.get_native_id())
            super()._take(what)

    monkeypatch.setattr(module, "MOST_AT_IT", 2)
    steps, threads, given_up = Steps(0.5), list[int](), [Told("accept") for _ in range(2)]
    present = steps.bounded(B, Grammar())
    try:
        for number, each in enumerate(given_up):
            assert not steps.bounded((REGEX, str(number)), each).accept_tokens("r", [1])
        assert [os.getpriority(os.PRIO_PROCESS, thread) for thread in threads] == [19, 19]
        assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) < 19
        with pytest.raises(Busy):
            steps.bounded((REGEX, "new"), Grammar())
        assert present.accept_tokens("r", [1])
        assert steps.bounded((JSON, "{}"), Grammar()).accept_tokens("r", [1])
    finally:
        for each in given_up:
            each.over.set()
    deadline = time.monotonic() + 30
    while steps._at_it and time.monotonic() < deadline:
        time.sleep(0.01)
    assert steps.bounded((REGEX, "new"), Grammar()).accept_tokens("r", [1])


def test_where_no_thread_may_be_put_behind_others_a_grammar_is_given_up_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refuse)
    own = Grammar("accept")
    assert not Steps(0.1).bounded(A, own).accept_tokens("r", [1])
    own.over.set()


def test_a_sequence_that_finds_no_thread_is_to_be_sent_again() -> None:
    completion: Any = SimpleNamespace(token_ids=[], stop_reason=core.BUSY)
    assert isinstance(answers._unmatched(Constraint("regex", "a"), (), completion), Overloaded)
