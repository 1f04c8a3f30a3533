"""A constraint as vLLM takes it, or why no grammar can be made of it.

Invariant: a constraint that takes long holds up a thread of few that do nothing else, and others wait for a
bounded time for one of them. Nothing ends a thread in XGrammar but XGrammar.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from functools import partial
from typing import Any

from vllm import SamplingParams as VllmParams
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import StructuredOutputsParams, check_json_nesting
from vllm.v1.engine.input_processor import InputProcessor

from services.common.contract.errors import InvalidRequest, Overloaded
from services.common.process.threads import WorkerThread
from services.sampler.engine.grammars.patterns import check_pattern
from services.sampler.engine.grammars.schemas import check_schema
from services.sampler.engine.sampling import Constraint

BACKEND = "xgrammar"
"""Of vLLM's backends the one that makes all grammars. Left to itself the front end would choose one for each
request, by what it asks for, and the engine's core keep to the first one's for all."""


CHECK_S = 10.0
CHECKS = 4
"""How many constraints are checked at a time. Most take milliseconds."""


class Checks:
    """Checks the constraints of an engine, on one event loop.

    Args:
        seconds: that one check may take, and as many may pass before it begins.
    """

    def __init__(self, processor: InputProcessor, threads: int = CHECKS, seconds: float = CHECK_S) -> None:
        self._processor, self._seconds = processor, seconds
        self._free: asyncio.Queue[WorkerThread] = asyncio.Queue()
        for number in range(threads):
            self._free.put_nowait(WorkerThread(f"constraint-{number}"))

    async def check(self, constraint: Constraint | None) -> StructuredOutputsParams | None:
        """As `parsed`; nothing of no constraint.

        Raises:
            InvalidRequest: as `parsed`, or it takes too long.
            Overloaded: all threads are at constraints that take long.
        """
        if constraint is None:
            return None
        thread = await self._thread()
        checking = thread.submit(partial(parsed, constraint, self._processor))
        loop = asyncio.get_running_loop()
        checking.add_done_callback(lambda _: self._give_back(thread, loop))
        try:
            async with asyncio.timeout(self._seconds):
                return await asyncio.wrap_future(checking)
        except TimeoutError as error:
            raise InvalidRequest(
                f"no grammar came of this {constraint.kind} in {self._seconds:g} s; send a simpler one, with "
                "fewer choices, repetitions or properties",
                "constraint_too_large",
            ) from error

    def _give_back(self, thread: WorkerThread, loop: asyncio.AbstractEventLoop) -> None:
        # The loop may be closed by then.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(self._free.put_nowait, thread)

    async def _thread(self) -> WorkerThread:
        try:
            async with asyncio.timeout(self._seconds):
                return await self._free.get()
        except TimeoutError as error:
            raise Overloaded(
                "all threads that check constraints are at ones that take long; try again later"
            ) from error


def parsed(constraint: Constraint, processor: InputProcessor) -> StructuredOutputsParams:
    """A constraint that XGrammar enforces as a whole. May take long, and lets the rest of the process run:
    what takes long is C++, as what is read here in Python is bounded.

    Raises:
        InvalidRequest: no grammar can be made of it, or one that would admit more.
    """
    params = VllmParams(structured_outputs=_asked(constraint))
    assert params.structured_outputs is not None
    try:
        _check_enforced(constraint)
        params._validate_structured_outputs(
            processor.model_config, processor.structured_outputs_config, processor.tokenizer
        )
    except (VLLMClientError, ValueError) as error:
        raise InvalidRequest(str(error)) from error
    return params.structured_outputs


def _asked(constraint: Constraint) -> StructuredOutputsParams:
    match constraint.kind:
        case "json_schema":
            return StructuredOutputsParams(json=constraint.source)
        case "structural_tag":
            return StructuredOutputsParams(structural_tag=constraint.source)
        case "regex":
            return StructuredOutputsParams(regex=constraint.source)


def _check_enforced(constraint: Constraint) -> None:
    """Raises InvalidRequest where XGrammar would pass over something, and ValueError where JSON is none."""
    if constraint.kind == "regex":
        check_pattern(constraint.source, "the regex")
        return
    check_json_nesting(constraint.source, structural_tag=constraint.kind == "structural_tag")
    found = json.loads(constraint.source)
    if constraint.kind == "json_schema":
        check_schema(found)
        return
    for number, schema in enumerate(_tagged(found), start=1):
        check_schema(schema, f"JSON Schema {number} of the structural tag")


def _tagged(tag: Any) -> Iterator[Any]:
    """The schemas in a structural tag, in order. vLLM's own check looks at none of them."""
    if isinstance(tag, list):
        for each in tag:
            yield from _tagged(each)
    elif isinstance(tag, dict):
        for name, each in tag.items():
            if name in ("json_schema", "schema"):
                yield each
            else:
                yield from _tagged(each)
