"""Log-probabilities in the process of the engine's core, beside vLLM's scheduler.

Of requests that want those of sampled tokens alone, which are most, vLLM's scheduler is given none. When a
step's outputs are made, the first of theirs gets the numbers of all.

Invariant: the array has the numbers of the outputs in order, as many of each as it is told to have, and each
was computed of that very token. Requests that want likely tokens too, and numbers of other tokens than were
sampled, go by vLLM's own way.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import LogprobsLists

_NONE = np.empty(0, dtype=np.int32)


def install(scheduler: Any) -> None:
    """Has a scheduler send the log-probabilities of a step's sampled tokens as one array."""
    for of, name in (
        (scheduler, "update_from_output"),
        (scheduler, "requests"),
        (LogprobsLists, "slice_request"),
    ):
        if not hasattr(of, name):
            kind = of if isinstance(of, type) else type(of)
            raise RuntimeError(f"this vLLM's {kind.__name__} has no {name}; check {__name__}")
    update = scheduler.update_from_output

    def updated(scheduled: Any, made: Any) -> Any:
        if made.logprobs is None:
            return update(scheduled, made)
        rows = StepRows(*made.logprobs)
        rows.begin(made.req_ids, scheduler.requests)
        # Others who read what the workers made find it as it was.
        made = copy.copy(made)
        made.logprobs = rows
        outputs = update(scheduled, made)
        for of_client in outputs.values():
            pack(of_client.outputs, rows, rows.held)
        return outputs

    scheduler.update_from_output = updated


class StepRows(LogprobsLists):
    """A step's rows, of which vLLM's scheduler takes those of each request that has an output.

    Attributes:
        held: of requests that were given none, where theirs begin.
    """

    held: dict[str, int]

    def begin(self, names: Sequence[str], requests: Mapping[str, Any]) -> None:
        """`names`: of the requests whose rows these are, in order. `requests`: by name."""
        self.held, self._names, self._requests = {}, names, requests

    def slice_request(self, req_idx: int, num_positions: int) -> LogprobsLists | None:
        """As vLLM's own, or None."""
        name, starts = self._names[req_idx], self.cu_num_generated_tokens
        first = req_idx if starts is None else starts[req_idx]
        # Likely tokens too, or rows that are not there.
        if self._requests[name].sampling_params.num_logprobs or first + num_positions > len(self.logprobs):
            return super().slice_request(req_idx, num_positions)
        self.held[name] = first
        return None


def pack(outputs: Sequence[EngineCoreOutput], rows: LogprobsLists, held: dict[str, int]) -> None:
    """Gives the first output of those that lack their log-probabilities those of all.

    Args:
        rows: of the step.
        held: where the rows of the outputs begin that lack theirs, by their requests. What goes by vLLM's own
            way in the end is taken out.
    """
    counts: list[int] = []
    places: list[int] = []
    tokens: list[int] = []
    for output in outputs:
        if (first := held.get(output.request_id)) is None:
            counts.append(0)
            continue
        count = len(output.new_token_ids)
        counts.append(count)
        places += range(first, first + count)
        tokens += output.new_token_ids
    if not tokens:
        return
    other = rows.logprob_token_ids[places, 0] != tokens
    if other.any():
        for index in np.unique(np.repeat(np.arange(len(outputs)), counts)[other]):
            _send_apart(outputs[index], rows, held)
        pack(outputs, rows, held)
        return
    carrier = next(output for output, count in zip(outputs, counts, strict=True) if count)
    carrier.new_logprobs = LogprobsLists(_NONE, rows.logprobs[places, 0], np.array(counts, dtype=np.uint16))


def _send_apart(output: EngineCoreOutput, rows: LogprobsLists, held: dict[str, int]) -> None:
    first = held.pop(output.request_id)
    whole = LogprobsLists(*rows[:3])
    output.new_logprobs = whole.slice_request(first, len(output.new_token_ids))
