"""Which sequences of which request are in the engine, and how far vLLM is with them.

Invariant: what is asked of one request looks at its own sequences and at no other's, and how many wait for
their first token is known from those that wait: neither takes longer the more sequences are generated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from services.sampler.engine.snapshot_key import Adapter


class Run:
    """A job that is generated: what its sequences are called in vLLM, how many tokens those that are over
    have, how many it was said to have, and whether it is being interrupted; if so, whether also before each
    of them has a token. With which adapter a sequence enters the engine now, and of which versions those are
    that it has had, by their ids."""

    def __init__(self) -> None:
        self.adapter: Adapter | None = None
        self.version = 0
        self.version_of: dict[int, int] = {}
        self.names: set[str] = set()
        self.ended = self.said = 0
        self.interruption: asyncio.Task[None] | None = None
        self.at_once = False

    def take(self, adapter: Adapter | None, version: int) -> None:
        """From here on its sequences enter the engine with this adapter, of this version."""
        self.adapter, self.version = adapter, version
        if adapter is not None:
            self.version_of[adapter.id] = version

    def version_told(self, of: int) -> int:
        """Which version the engine's core tells of, which names an adapter by its id, and all weights of a
        model by their version."""
        return of if self.adapter is None else self.version_of[of]


class Processor(Protocol):
    """What this needs of vLLM's output processor: states by its own ids, and its ids by the names that it was
    given."""

    @property
    def request_states(self) -> Mapping[str, Any]: ...

    @property
    def external_req_ids(self) -> Mapping[str, Sequence[str]]: ...


class Runs:
    """The jobs of one engine, by request id. Times are seconds of one monotonic clock."""

    def __init__(self, processor: Processor) -> None:
        self._processor = processor
        self._runs: dict[str, Run] = {}
        self._unbegun: dict[str, float] = {}

    def begin(self, request_id: str) -> Run:
        """A job begins; of two with one id the later one is meant by it."""
        run = self._runs[request_id] = Run()
        return run

    def end(self, request_id: str, run: Run) -> None:
        """A job is done."""
        if self._runs.get(request_id) is run:
            del self._runs[request_id]

    def take(self, version: int) -> None:
        """All jobs go on with this version of all weights."""
        for run in self._runs.values():
            run.take(None, version)

    def find(self, request_id: str) -> Run | None:
        """The job that is generated for a request."""
        return self._runs.get(request_id)

    def enter(self, run: Run, name: str, now: float) -> None:
        """A sequence goes into the engine."""
        run.names.add(name)
        self._unbegun[name] = now

    def leave(self, run: Run, name: str, tokens: int) -> None:
        """A sequence is out of it, with so many tokens."""
        run.names.discard(name)
        run.ended += tokens
        self._unbegun.pop(name, None)

    def begun(self, run: Run) -> list[str]:
        """Its sequences that have made a token."""
        return [name for name in run.names if any(not state.is_prefilling for state in self._states(name))]

    def tokens_of(self, request_id: str) -> int:
        """Tokens that were generated for a request that still runs. They never become fewer, also in the
        moment in which vLLM has let go of a sequence that is not out yet."""
        run = self._runs.get(request_id)
        if run is None:
            return 0
        states = [state for name in run.names for state in self._states(name)]
        now = run.ended + sum(state.detokenizer.num_output_tokens() for state in states)
        run.said = max(run.said, now)
        return run.said

    def late(self, entered_by: float) -> int:
        """Sequences that entered by then and have made no token. One that has is looked at once."""
        count, begun = 0, []
        for name, since in self._unbegun.items():
            if since > entered_by:
                break
            states = list(self._states(name))
            if any(not state.is_prefilling for state in states):
                begun.append(name)
            else:
                count += bool(states)
        for name in begun:
            del self._unbegun[name]
        return count

    def _states(self, name: str) -> Iterator[Any]:
        # `get`: vLLM's own mapping makes an entry of what is only looked up.
        for internal in self._processor.external_req_ids.get(name, ()):
            if (state := self._processor.request_states.get(internal)) is not None:
                yield state
