"""Shifts in the process of the engine's core, beside vLLM's scheduler.

What the scheduler has scheduled is computed with the adapter that a request had then, so that a shift falls
between two steps, whatever is under way. Tokens up to `num_computed_tokens` have keys and values of the old
adapter; the last token, which the old one sampled and nothing has computed yet, gets its own from the new
one.

Invariants: a step has no more adapters than slots: where old and new do not fit beside the others, all
sequences of the old one shift at once. A block of keys and values is cached under the name of the adapter
that computed all of it and all before it, or under a name that no other request ever has. A sequence that
vLLM gave up to make room begins again as one of its present adapter alone, and this is said. What has made no
token yet and is not being computed takes the new adapter from the start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import RequestStatus

from services.sampler.worker.runner import attach

SHIFT = "tinsmith_shift"
"""The method of vLLM's engine core that asks for shifts."""

SHIFTS_KEY = "tinsmith_shifts"
"""Under which the outputs of a sequence say [tokens before, adapter's id, whether keys and values were kept]
of each of its shifts; of all weights, their version in place of the adapter's id."""

Told = tuple[tuple[int, int, bool], ...]


def install(scheduler: Any, most_adapters: int) -> None:
    """Has a scheduler shift requests when the engine core's `SHIFT` asks for it.

    Args:
        most_adapters: of one step.
    """
    shifts = Shifts(scheduler, most_adapters)
    schedule = scheduler.schedule

    def scheduled(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        attach(output, shifts.take())
        return output

    scheduler.schedule = scheduled
    between_steps(scheduler, shifts.apply, shifts.told)
    scheduler.tinsmith_shifts = shifts
    setattr(EngineCore, SHIFT, _shift)


def between_steps(scheduler: Any, apply: Callable[[], None], told: Mapping[str, Told]) -> None:
    """Has `apply` called before each step is scheduled, and what is told of sequences written into its
    outputs."""
    schedule, update = scheduler.schedule, scheduler.update_from_output

    def scheduled(*args: Any, **kwargs: Any) -> Any:
        apply()
        return schedule(*args, **kwargs)

    def updated(*args: Any, **kwargs: Any) -> Any:
        outputs = update(*args, **kwargs)
        for of_client in outputs.values() if told else ():
            for output in of_client.outputs:
                if (of_sequence := told.get(output.request_id)) is not None:
                    output.kv_transfer_params = {SHIFTS_KEY: of_sequence}
        return outputs

    scheduler.schedule, scheduler.update_from_output = scheduled, updated


def note(told: dict[str, Told], name: str, shift: tuple[int, int, bool]) -> None:
    """A request shifts once more; a shift after as many tokens, of which none came, is none."""
    told[name] = (*(one for one in told.get(name, ()) if one[0] != shift[0]), shift)


def forget_ended(scheduler: Any, *known: dict[str, Any]) -> None:
    """Drops what is known of requests that a scheduler has no more."""
    for of_request in known:
        for name in [name for name in of_request if name not in scheduler.requests]:
            del of_request[name]


def _shift(core: Any, requests: Any, name: Any, adapter_id: Any, path: Any) -> list[str]:
    shifts: Shifts = core.scheduler.tinsmith_shifts
    return shifts.ask(requests, LoRARequest(name, adapter_id, path))


class Shifts:
    """The shifts of one scheduler's requests.

    Attributes:
        told: what is known of the shifts of each.
    """

    def __init__(self, scheduler: Any, most_adapters: int) -> None:
        self._scheduler = scheduler
        self._most = most_adapters
        self._wanted: dict[str, LoRARequest] = {}
        self._mixed: dict[str, LoRARequest] = {}
        """Requests whose keys and values are of several adapters, with the present one."""
        self.told: dict[str, Told] = {}
        self._taken: dict[str, LoRARequest] = {}

    def ask(self, requests: list[str], adapter: LoRARequest) -> list[str]:
        """Wants requests to go on with an adapter as soon as each can; those that do already, or have it from
        the start, are returned. Ask again for the others."""
        done = []
        for name in requests:
            request = self._scheduler.requests.get(name)
            if request is None or request.lora_request is None:
                continue
            if request.lora_request.lora_int_id == adapter.lora_int_id:
                done.append(name)
            else:
                self._wanted[name] = adapter
        return done

    def apply(self) -> None:
        """Shifts what can be shifted. Call it before each step is scheduled."""
        forget_ended(self._scheduler, self._wanted, self._mixed, self.told)
        for name, adapter in list(self._mixed.items()):
            request = self._scheduler.requests[name]
            if request.status == RequestStatus.PREEMPTED and name not in self._wanted and is_still(request):
                self._anew(request, adapter)
        together: dict[tuple[int, int], list[Any]] = {}
        for name, adapter in list(self._wanted.items()):
            request = self._scheduler.requests[name]
            if request.status != RequestStatus.RUNNING:
                if is_still(request):
                    self._anew(request, adapter)
            elif not request.is_prefill_chunk and self._made(request):
                of = request.lora_request.lora_int_id, adapter.lora_int_id
                together.setdefault(of, []).append(request)
        for (_, adapter_id), requests in together.items():
            if self._fit(requests, adapter_id):
                for request in requests:
                    self._keep(request, self._wanted[request.request_id])

    def take(self) -> dict[str, LoRARequest]:
        """What workers have to know of since the last time."""
        taken, self._taken = self._taken, {}
        return taken

    def _made(self, request: Any) -> int:
        """Tokens of a running request that its present adapter and earlier ones have made, or make in steps
        under way."""
        if self._scheduler.scheduler_config.async_scheduling:
            return int(request.num_output_tokens + request.num_output_placeholders)
        # Without, a request is in one step at most, which makes a token of it: drafts are for one stage.
        return int(request.num_output_tokens + (request.num_in_flight_tokens > 0))

    def _fit(self, requests: list[Any], adapter_id: int) -> bool:
        """Whether a step has slots enough when these have the adapter."""
        shifted = {request.request_id for request in requests}
        others = (one for one in self._scheduler.running if one.request_id not in shifted)
        adapters = {one.lora_request.lora_int_id for one in others if one.lora_request is not None}
        return len(adapters | {adapter_id}) <= self._most

    def _keep(self, request: Any, adapter: LoRARequest) -> None:
        name = request.request_id
        self._note(request, self._made(request), adapter, kept=True)
        self._mixed[name] = adapter
        # vLLM names a block when its last token is known, which may be before that is computed.
        del request.block_hashes[request.num_computed_tokens // self._scheduler.hash_block_size :]
        request.lora_request = LoRARequest(
            f"{adapter.lora_name} in {name}", adapter.lora_int_id, adapter.lora_path
        )
        request.update_block_hashes()

    def _anew(self, request: Any, adapter: LoRARequest) -> None:
        self._note(request, request.num_output_tokens, adapter, kept=False)
        self._mixed.pop(request.request_id, None)
        request.block_hashes.clear()
        request.lora_request = adapter
        request.update_block_hashes()

    def _note(self, request: Any, start: int, adapter: LoRARequest, kept: bool) -> None:
        name = request.request_id
        self._wanted.pop(name, None)
        self._taken[name] = adapter
        note(self.told, name, (start, adapter.lora_int_id, kept))


def is_still(request: Any) -> bool:
    """Whether a request that does not run has nothing computed, and nothing is being computed of it."""
    return not request.num_computed_tokens and not request.num_in_flight_tokens
