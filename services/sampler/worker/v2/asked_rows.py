"""What vLLM's worker copies and keeps of experts, where it tells them: of requests that ask, while they run.

vLLM copies those of all tokens of a step to the host and keeps them there, for whoever's prompt begins alike
later. Here the blocks of a request have names of its own (engine/experts/own_rows.py), so nobody reads
another's rows, nor a request's after its end. So the rows of requests alone that the scheduler names to the
worker leave the GPU, and nothing in a step without one. And a name that nobody holds any more is forgotten
with what is under it; vLLM would keep it until it needs the place, and to find it look at all that is held.
No report was found of either: to vLLM all requests ask, and what ended may be read again.

Invariant: what vLLM is given of a request that asks is what it would have been given of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.distributed.aux_output_connector.connector import AuxRequestOutput
from vllm.distributed.aux_output_connector.worker import PendingAuxOutput

from services.sampler.worker.row_scores import on


def install(connector: Any) -> None:
    """Has a worker's AuxOutputWorkerConnector, which has no requests yet, copy and keep no others."""
    if connector._buffer is None:
        # Only the first worker tells, and vLLM keeps nothing in others.
        return
    _copy_asked(connector)
    _forget_released(connector._store._store)


@dataclass(eq=False)
class _Part(PendingAuxOutput):
    """Of the rows of a step those of some of its requests.

    Args:
        places: of these in the step.
    """

    places: Any = None

    def process_output(self) -> dict[str, AuxRequestOutput]:
        """Of the requests of the step that ask, the rows that are to leave."""
        # vLLM has given those of the whole step, and filled them since.
        own: Any = self
        own.num_sampled = own.num_sampled[self.places]
        own.num_rejected = own.num_rejected[self.places]
        return super().process_output()


def _copy_asked(connector: Any) -> None:
    prepare_output = connector.prepare_output
    capturer = connector._capturer

    def prepared(input_batch: Any) -> PendingAuxOutput | None:
        asked = () if connector._step_metadata is None else connector._step_metadata.requests
        names = [name for name in input_batch.req_ids if name in asked]
        if not names:
            return None
        if len(names) == len(input_batch.req_ids):
            pending: PendingAuxOutput | None = prepare_output(input_batch)
            return pending
        places = np.array([place for place, name in enumerate(input_batch.req_ids) if name in asked])
        starts = input_batch.query_start_loc_np[places].astype(np.int64)
        counts = input_batch.query_start_loc_np[places + 1] - starts
        ends = np.cumsum(counts)
        rows = np.arange(ends[-1]) + np.repeat(starts - ends + counts, counts)
        told = capturer.device_buffer
        part = _Part(
            connector=connector,
            request_ids=names,
            token_starts=input_batch.num_computed_tokens_np[places],
            query_start_loc=np.concatenate([[0], ends]),
            routed_experts_gpu=told.index_select(0, on(told.device, rows)).to(capturer.output_dtype),
            places=places,
        )
        with connector._lock:
            connector._pending_outputs.append(part)
            for name in names:
                connector._requests[name].pending_outputs += 1
        return part

    connector.prepare_output = prepared


def _forget_released(store: Any) -> None:
    put = store.put

    def forgetting(objects: Any, *, retain_keys: Any = (), release_keys: Any = ()) -> None:
        put(objects, retain_keys=retain_keys, release_keys=release_keys)
        # All that is there has a place now.
        for key in release_keys:
            if key not in store._references and (slot := store._lru.pop(key, None)) is not None:
                store._free_slots.append(slot)

    store.put = forgetting
