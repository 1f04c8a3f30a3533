"""Shifts as the front end sees them: asked for until they are done, and read from what the engine answers.

Invariant: of every token that has arrived here it is known by then which weights made it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from services.common.contract.errors import Internal, Unavailable
from services.common.telemetry.repeats import Repeats
from services.sampler.engine.calls.reports import ENDED
from services.sampler.engine.calls.workers import CALL_S
from services.sampler.engine.runs import Run
from services.sampler.engine.sampling import Change
from services.sampler.engine.shifts.core import SHIFT, SHIFTS_KEY
from services.sampler.engine.snapshot_key import Adapter

log = logging.getLogger(__name__)

AGAIN_S = 0.02
_ENGINE = "the engine"


class Shifts:
    """The shifts of one engine's sequences.

    Args:
        llm: vLLM's AsyncLLM, which has answered nothing yet.
        dead: whether the engine's process is gone.
    """

    def __init__(self, llm: Any, dead: Callable[[], bool]) -> None:
        self._core = llm.engine_core
        self._processor = llm.output_processor
        self._dead = dead
        self._told: dict[str, Sequence[Any]] = {}
        self._silent = Repeats(log, "sequences wait for another adapter")
        process = self._processor.process_outputs

        def noted(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            # Before its sequence may be let go of, and whatever becomes of the output: vLLM joins those that
            # wait to be read.
            self._note(outputs)
            return process(outputs, *args, **kwargs)

        self._processor.process_outputs = noted

    async def shift(self, run: Run, adapter: Adapter, version: int) -> None:
        """Has the sequences of a job go on with another adapter, of this version. Returns when all that have
        not ended do; no step that is scheduled from then on has the old one for them. One that is stuck
        is ended by who watches it.

        Raises:
            Unavailable: the engine died.
            Internal: it refused.
        """
        run.take(adapter, version)
        while True:
            ids = {name: tuple(self._processor.external_req_ids.get(name, ())) for name in run.names}
            wanted = [one for of_name in ids.values() for one in of_name]
            done = await self._ask(wanted, adapter)
            # What vLLM is just about to take on is not known to it yet.
            if all(name in ids and ids[name] and done.issuperset(ids[name]) for name in run.names):
                return
            await asyncio.sleep(AGAIN_S)

    async def _ask(self, ids: list[str], adapter: Adapter) -> set[str]:
        """Which of these, by vLLM's own ids, have the adapter now, as far as the engine says so in time."""
        try:
            async with asyncio.timeout(CALL_S):
                arguments = SHIFT, ids, adapter.name, adapter.id, adapter.directory
                done = set(await self._core.call_utility_async(*arguments))
            self._silent.over(_ENGINE)
            return done
        except TimeoutError:
            # A step may take longer, and whoever gave up here would keep both adapters to its end.
            self._silent.failed(_ENGINE, f"it did not answer {SHIFT} in {CALL_S:.0f} s, and is asked again")
            return set()
        except Exception as error:
            if self._dead():
                raise Unavailable(ENDED) from error
            raise Internal(f"{SHIFT} failed in the engine: {error}") from error

    def changes(self, name: str, run: Run, first: Change) -> tuple[Change, ...]:
        """What made the tokens of a sequence that have arrived.

        Args:
            first: what it entered the engine with.
        """
        told = self._told.get(name, ())
        return (first, *(Change(start, run.version_told(of), kept) for start, of, kept in told))

    def forget(self, name: str) -> None:
        """A sequence is out of the engine."""
        self._told.pop(name, None)

    def _note(self, outputs: Sequence[Any]) -> None:
        for output in outputs:
            told: Sequence[Any] | None = (output.kv_transfer_params or {}).get(SHIFTS_KEY)
            if told and (state := self._processor.request_states.get(output.request_id)) is not None:
                self._told[state.external_req_id] = told
