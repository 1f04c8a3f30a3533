"""How long a grammar may keep a step of the engine, in the process of its core.

vLLM waits in each step for what XGrammar says of the next token. A small expression may have that double with
every token, like "((.{0,30}){0,60}){0,9}" (no upstream report found): all that the engine runs would stand
still, until it counts as stuck and ends, and then the next engine that the request is sent to. Here what
takes too long is given up: the sequence ends with its next token, as one whose constraint has a dead end, and
says why. To be given up a grammar must be asked by another thread, which takes as long as some quick answers
do, so those that nothing can make ambiguous are asked directly.

Invariant: a step waits for no grammar longer than its time, nor for all of them together longer than theirs,
but for a moment for each. What was given up is asked nothing any more: its thread may be at it for long, and
nothing ends that but XGrammar. It runs when others leave it a core, and while MOST_AT_IT are at such ones, no
grammar comes in that may need a thread.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar, StructuredOutputOptions

from services.common.process.threads import WorkerThread

STEP_S = 1.0
"""The most that a grammar may take for one token. Most take some microseconds."""

ALL_S = 5.0
"""The most that all grammars may take in one step."""

_LEAST_S = 0.02
"""That each has in a step in which others took all."""

_AFTER_S = 0.1
"""That each has after its time: a process that was stopped meanwhile has done nothing in it."""

TOO_SLOW = "tinsmith: this grammar takes too long"
"""The stop reason of a sequence whose grammar was given up."""

MOST_AT_IT = 16
"""Threads of what was given up."""

LAST = 19
"""The niceness of these, so that others come first."""

_REMEMBERED = 256
_REST_S = 600.0
"""For so long a constraint of which one was given up is not tried again: it may have been the machine."""

_QUICK_S = 0.05
"""What took longer is not asked directly any more."""

_AMBIGUOUS = frozenset({"anyOf", "oneOf", "allOf", "pattern", "patternProperties", "format"})
"""Of a JSON Schema: what one text may satisfy in several ways."""
_ANY = -1
"""Of a mask: each token of a word may come."""

T = TypeVar("T")


def is_unambiguous(constraint: tuple[StructuredOutputOptions, str]) -> bool:
    """Whether a text of a constraint has one way to be read, so that the next token takes little. Pure.

    Args:
        constraint: vLLM's key of it: its kind and source.
    """
    option, source = constraint
    if option != StructuredOutputOptions.JSON:
        return False
    left = [json.loads(source)]
    while left:
        schema = left.pop()
        if isinstance(schema, dict):
            if _AMBIGUOUS & schema.keys():
                return False
            left.extend(schema.values())
        elif isinstance(schema, list):
            left.extend(schema)
    return True


class _Kind:
    """The grammars of one constraint.

    Attributes:
        direct: they are asked by the thread that wants to know.
        rests: until when none is asked, by the monotonic clock.
    """

    def __init__(self, direct: bool) -> None:
        self.direct = direct
        self.rests = 0.0


class Busy(Exception):
    """A grammar cannot be asked now."""


class _Asking:
    """A thread that asks grammars."""

    def __init__(self) -> None:
        self.worker = WorkerThread("grammars in steps")
        self._id = self.worker.submit(threading.get_native_id).result()

    def give_up(self) -> None:
        """Lets it end after what it is at."""
        # Before it may end: its number could be another one's then. Not everybody may.
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self._id, LAST)
        self.worker.close()


class _Present(threading.local):
    """What asks for the present thread."""

    asking: _Asking | None = None


class Steps:
    """The grammars of one engine.

    Args:
        seconds: that one may take for a token.
        together: that all may take in a step.
    """

    def __init__(self, seconds: float = STEP_S, together: float = ALL_S) -> None:
        self._seconds, self._together = seconds, together
        self._left = together
        self._kinds: WeakValueDictionary[Any, _Kind] = WeakValueDictionary()
        self._slow: deque[_Kind] = deque(maxlen=_REMEMBERED)
        self._present = _Present()
        self._at_it = set[Future[Any]]()

    def begin(self) -> None:
        """The next step asks grammars."""
        self._left = self._together

    def bounded(
        self, constraint: tuple[StructuredOutputOptions, str], grammar: StructuredOutputGrammar
    ) -> InSteps:
        """A grammar that keeps to its time. With one that did not all of its constraint are given up, and
        those that come in the next minutes.

        Args:
            constraint: what it was made of.

        Raises:
            Busy: too many threads are at what was given up.
        """
        kind = self._kinds.get(constraint)
        if kind is None:
            kind = self._kinds[constraint] = _Kind(is_unambiguous(constraint))
        if not kind.direct and len(self._at_it) >= MOST_AT_IT:
            raise Busy("all threads that ask grammars are at ones that were given up")
        return InSteps(self, kind, grammar)

    def ask(self, grammar: InSteps, what: Callable[[], T], otherwise: T) -> T:
        """What a grammar says, or what is taken for it where it takes too long."""
        kind, began = grammar.kind, time.monotonic()
        if grammar.slow or began < kind.rests:
            grammar.slow = True
            return otherwise
        if kind.direct:
            found = what()
            kind.direct = time.monotonic() - began < _QUICK_S
            return found
        left = self._left
        asking = self._present.asking = self._present.asking or _Asking()
        asked = asking.worker.submit(what)
        try:
            for seconds in (max(_LEAST_S, min(self._seconds, left)), _AFTER_S):
                with suppress(TimeoutError):
                    return asked.result(seconds)
        finally:
            self._left -= time.monotonic() - began
        grammar.slow = True
        self._present.asking = None
        self._at_it.add(asked)
        asked.add_done_callback(self._at_it.discard)
        asking.give_up()
        if left >= self._seconds:
            # Others had left it its time. As long as it is kept, its constraint is known.
            kind.rests = time.monotonic() + _REST_S
            self._slow.append(kind)
        return otherwise


class InSteps(StructuredOutputGrammar):
    """In the place of vLLM's grammar of one sequence.

    Attributes:
        slow: it was given up.
    """

    def __init__(self, steps: Steps, kind: _Kind, of: StructuredOutputGrammar) -> None:
        self._steps, self.kind, self._of = steps, kind, of
        self._mask: torch.Tensor | None = None
        self.slow = False

    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
        """Where it was given up any token may come, which `accept_tokens` refuses."""
        # One of its own: a thread that was given up may write to it yet.
        if self._mask is None:
            self._mask = torch.full_like(bitmask[:1], _ANY)
        fill = partial(self._of.fill_bitmask, self._mask, 0)
        self._steps.ask(self, fill, None)
        if self.slow:
            bitmask[batch_index].fill_(_ANY)
        else:
            bitmask[batch_index].copy_(self._mask[0])

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        return self._steps.ask(self, partial(self._of.accept_tokens, request_id, tokens), False)

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        return self._steps.ask(self, partial(self._of.validate_tokens, tokens), [])

    def rollback(self, num_tokens: int) -> None:
        self._steps.ask(self, partial(self._of.rollback, num_tokens), None)

    def is_terminated(self) -> bool:
        return not self.slow and self._of.is_terminated()

    def reset(self) -> None:
        self._steps.ask(self, self._of.reset, None)
