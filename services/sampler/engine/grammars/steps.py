"""How long a grammar may keep a step of the engine, in the process of its core.

vLLM waits in each step for what XGrammar says of the next token. A small expression may have that double with
every token, like "((.{0,30}){0,60}){0,9}" (no upstream report found): all that the engine runs would stand
still, until it counts as stuck and ends, and then the next engine that the request is sent to. Here what
takes too long is given up: the sequence ends with its next token, as one whose constraint has a dead end, and
says why.

Invariant: a step waits for no grammar longer than its time, nor for all of them together longer than theirs,
but for a moment for each. What was given up is asked nothing any more: its thread may be at it for long, and
nothing ends that but XGrammar.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

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

_REMEMBERED = 256
_ANY = -1
"""Of a mask: each token of a word may come."""

T = TypeVar("T")


class _Kind:
    """The grammars of one constraint."""

    slow = False


class _Thread(threading.local):
    """The one that asks grammars for the present one."""

    worker: WorkerThread | None = None


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
        self._thread = _Thread()

    def begin(self) -> None:
        """The next step asks grammars."""
        self._left = self._together

    def bounded(self, constraint: Any, grammar: StructuredOutputGrammar) -> InSteps:
        """A grammar that keeps to its time. With one that did not all of its constraint are given up, and
        those that come later.

        Args:
            constraint: hashable; what it was made of.
        """
        kind = self._kinds.setdefault(constraint, _Kind())
        return InSteps(self, kind, grammar)

    def ask(self, kind: _Kind, what: Callable[[], T], otherwise: T) -> T:
        """What a grammar says, or what is taken for it where it takes too long."""
        if kind.slow:
            return otherwise
        worker = self._thread.worker = self._thread.worker or WorkerThread("grammars in steps")
        began, asked = time.monotonic(), worker.submit(what)
        try:
            for seconds in (max(_LEAST_S, min(self._seconds, self._left)), _AFTER_S):
                with suppress(TimeoutError):
                    return asked.result(seconds)
        finally:
            self._left -= time.monotonic() - began
        self._give_up(kind)
        return otherwise

    def _give_up(self, kind: _Kind) -> None:
        kind.slow = True
        worker, self._thread.worker = self._thread.worker, None
        if worker is not None:
            worker.close()
        # As long as it is kept, its constraint is known.
        self._slow.append(kind)


class InSteps(StructuredOutputGrammar):
    """In the place of vLLM's grammar of one sequence."""

    def __init__(self, steps: Steps, kind: _Kind, of: StructuredOutputGrammar) -> None:
        self._steps, self._kind, self._of = steps, kind, of
        self._mask: torch.Tensor | None = None

    @property
    def slow(self) -> bool:
        """Whether it was given up."""
        return self._kind.slow

    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
        """Where it was given up any token may come, which `accept_tokens` refuses."""
        # One of its own: a thread that was given up may write to it yet.
        if self._mask is None:
            self._mask = torch.full_like(bitmask[:1], _ANY)
        fill = partial(self._of.fill_bitmask, self._mask, 0)
        self._steps.ask(self._kind, fill, None)
        if self.slow:
            bitmask[batch_index].fill_(_ANY)
        else:
            bitmask[batch_index].copy_(self._mask[0])

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        return self._steps.ask(self._kind, partial(self._of.accept_tokens, request_id, tokens), False)

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        return self._steps.ask(self._kind, partial(self._of.validate_tokens, tokens), [])

    def rollback(self, num_tokens: int) -> None:
        self._steps.ask(self._kind, partial(self._of.rollback, num_tokens), None)

    def is_terminated(self) -> bool:
        return not self.slow and self._of.is_terminated()

    def reset(self) -> None:
        self._steps.ask(self._kind, self._of.reset, None)
