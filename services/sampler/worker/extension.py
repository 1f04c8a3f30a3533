"""What a vLLM worker does for Tinsmith: joins weight groups and takes weights, from memory or disk.

vLLM mixes WorkerExtension into its worker class; its methods are called between engine steps with
`collective_rpc`. Waiting, copying, scaling and packing therefore happen in a thread ("a job"), and the engine
only registers the finished adapter, so running generations go on meanwhile. A job tells the front end by
itself that it is done.

Invariant: an adapter is registered whole and checked, under an id that no request uses yet, or not at all;
an adapter that is registered has been checked against the engine's slots, so using it cannot fail. What runs
keeps its slot: an adapter that comes takes a free one or none.

This file, full_weights.py, adapter_rows.py and the rooms adapters, cpu, gpu, v1 and v2 are the only
ones that touch vLLM's worker internals; what is of one model runner alone is behind runner.py.
"""

from __future__ import annotations

import functools
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.models.utils import get_pp_missing_layer_names

from services.common import weights
from services.common.contract.adapters import LORA_ALPHA
from services.common.contract.errors import (
    DataLoss,
    DeadlineExceeded,
    Internal,
    InvalidRequest,
)
from services.common.contract.tensors import TensorSpec
from services.common.process.memory import allocator
from services.common.weights.medium import Medium
from services.sampler.config import REDIS_URL_VARIABLE
from services.sampler.worker import full_weights
from services.sampler.worker.adapters import heads
from services.sampler.worker.adapters.slots import PackedAdapter
from services.sampler.worker.cpu import norms
from services.sampler.worker.gpu import memory
from services.sampler.worker.jobs import Job, Outcome, Reporter
from services.sampler.worker.runner import Runner, installed
from services.sampler.worker.text import models as text_models

# A worker imports this file before it loads its model.
text_models.register()
memory.correct()
heads.correct()
norms.apply()

_PEFT_PREFIX = "base_model.model."


@contextmanager
def _deadline() -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise DeadlineExceeded(str(error)) from error


class _State:
    """What the extension keeps; the worker class itself has no constructor of ours."""

    def __init__(self, runner: Runner, reporter: Reporter) -> None:
        self.runner = runner
        self.reporter = reporter
        self.group: weights.WeightGroup | None = None
        self.jobs: dict[str, Job] = {}
        self.staged: dict[int, dict[str, torch.Tensor]] = {}
        self.swapping = threading.Lock()


class WorkerExtension:
    """Methods for `collective_rpc`. Arguments and results are plain values."""

    # Of the vLLM worker this is mixed into.
    rank: int
    device: torch.device
    model_runner: Any
    execute_dummy_batch: Callable[[], None]

    def tinsmith_setup(self, reports: str) -> str:
        """Applies what vLLM lacks. Called once, before the first request.

        Args:
            reports: path of the socket that takes what becomes of jobs.

        Returns:
            The GPU's UUID.
        """
        if self.device.type == "cpu" and self.model_runner.parallel_config.pipeline_parallel_size > 1:
            # The first batch makes room for what a stage receives. On a CPU vLLM leaves its warm-up out.
            self.execute_dummy_batch()
        if self.device.type == "cpu":
            allocator.keep_freed_memory()
        self.tinsmith_state = _State(installed(self), Reporter(reports, self.rank))
        if self.device.type != "cuda":
            return ""
        return str(torch.cuda.get_device_properties(self.device).uuid)

    def tinsmith_steps(self) -> int:
        """Steps that this worker has finished."""
        return self.tinsmith_state.runner.steps

    def tinsmith_routing(self) -> Sequence[int]:
        """Routed layers, choices of a token and experts, where it tells which experts have a request's
        tokens; else nothing."""
        routing = self.tinsmith_state.runner.routing
        return () if routing is None else (routing.layers, routing.top_k, routing.experts)

    def tinsmith_join(
        self,
        job: str,
        epoch: int,
        first_rank: int,
        world_size: int,
        medium: Medium,
        base_model: str,
        timeout: float,
    ) -> None:
        """Starts joining weight group `epoch`, leaving the present one."""
        self.tinsmith_leave()
        rank = first_rank + self.rank
        device = str(self.device) if medium == "nccl" else "cpu"

        def work() -> weights.WeightGroup:
            url = os.environ[REDIS_URL_VARIABLE]
            try:
                return weights.join(base_model, epoch, rank, world_size, device, url, timeout)
            except (RuntimeError, TimeoutError) as error:
                raise DeadlineExceeded(f"weight group {epoch} did not come together: {error}") from error

        def finish(group: weights.WeightGroup) -> int:
            self.tinsmith_state.group = group
            return 0

        self._tinsmith_start(job, f"join-{epoch}", work, finish, weights.WeightGroup.abort)

    def tinsmith_leave(self) -> None:
        """Gives the weight group up; a transfer that waits fails."""
        group, self.tinsmith_state.group = self.tinsmith_state.group, None
        if group is not None:
            threading.Thread(target=group.abort, name=f"leave-{group.epoch}", daemon=True).start()

    def tinsmith_receive(
        self, job: str, epoch: int, adapter_id: int, rank: int, specs: list, checksum: int, timeout: float
    ) -> None:
        """Starts receiving an adapter. specs: [name, dtype, shape] of each tensor, in order."""
        layout = [TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in specs]

        def work() -> PackedAdapter:
            tensors = self._tinsmith_received(epoch, layout, checksum, timeout)
            return self._tinsmith_packed(self._tinsmith_adapter(adapter_id, rank, tensors))

        self._tinsmith_start(job, f"receive-{adapter_id}", work, self._tinsmith_register)

    def tinsmith_stage(
        self, job: str, stage_id: int | None, epoch: int, specs: list, checksum: int, timeout: float
    ) -> None:
        """Starts receiving a full model into host memory; stage_id None = without keeping it."""
        layout = [TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in specs]

        def work() -> dict[str, torch.Tensor]:
            if stage_id is not None:
                return self._tinsmith_received(epoch, layout, checksum, timeout)
            with _deadline():
                self._tinsmith_group(epoch).discard(weights.nbytes(layout), timeout)
            return {}

        def finish(tensors: dict[str, torch.Tensor]) -> int:
            if stage_id is not None:
                self.tinsmith_state.staged[stage_id] = tensors
            return 0

        self._tinsmith_start(job, f"stage-{stage_id}", work, finish)

    def tinsmith_drop_staged(self, stage_ids: list[int]) -> None:
        """Frees staged weights."""
        for stage_id in stage_ids:
            self.tinsmith_state.staged.pop(stage_id, None)

    def tinsmith_check(self, job: str, source: int | str) -> None:
        """Starts to see whether weights fit this model; none is replaced. No request runs meanwhile.

        Args:
            source: id of staged weights, or a model's directory.
        """
        tensors = self._tinsmith_source(source)

        def work() -> None:
            with self.tinsmith_state.swapping:
                full_weights.check(self, tensors())

        self._tinsmith_start(job, f"check-{source}", work)

    def tinsmith_swap(self, job: str, source: int | str | None) -> None:
        """Starts replacing the model's weights. No request runs meanwhile.

        Args:
            source: id of staged weights, or a model's directory, or None = the base model's own files.
        """
        tensors = self._tinsmith_source(source)

        def work() -> None:
            # One that was given up for its time may still be at it.
            with self.tinsmith_state.swapping:
                if source is None:
                    # All others were checked before.
                    full_weights.check_base(self)
                full_weights.load(self, tensors())

        self._tinsmith_start(job, f"swap-{source}", work)

    def _tinsmith_source(self, source: int | str | None) -> Callable[[], full_weights.NamedTensors]:
        """What gives the tensors, in a thread. Dropping them from the stage meanwhile does no harm."""
        if source is None:
            return lambda: full_weights.base_tensors(self)
        if isinstance(source, int):
            return self.tinsmith_state.staged[source].items
        return lambda: full_weights.stored_tensors(Path(source))

    def tinsmith_load(self, job: str, adapter_id: int, directory: str) -> None:
        """Starts loading an adapter from a snapshot directory in PEFT format."""

        def work() -> PackedAdapter:
            config = json.loads((Path(directory) / "adapter_config.json").read_text())
            tensors = load_file(Path(directory) / "adapter_model.safetensors")
            named = {
                name.removeprefix(_PEFT_PREFIX).removesuffix(".weight"): tensor
                for name, tensor in tensors.items()
            }
            return self._tinsmith_packed(self._tinsmith_adapter(adapter_id, int(config["r"]), named))

        self._tinsmith_start(job, f"load-{adapter_id}", work, self._tinsmith_register)

    def _tinsmith_start(
        self, job: str, name: str, work: Callable[[], Any], *ends: Callable[[Any], Any]
    ) -> None:
        """Starts a job. ends: what gives its result an effect and what does away with it, as of Job."""
        tell = functools.partial(self.tinsmith_state.reporter.tell, job)
        self.tinsmith_state.jobs[job] = Job(name, work, tell, *ends)

    def tinsmith_finish(self, job: str) -> Outcome:
        """Has a job take effect that is done on all workers: they do so between the same two steps."""
        return self.tinsmith_state.jobs.pop(job).finish()

    def tinsmith_forget(self, jobs: list[str]) -> None:
        """Jobs that shall have no effect any more, whether they are done or not."""
        for job in jobs:
            if (forgotten := self.tinsmith_state.jobs.pop(job, None)) is not None:
                forgotten.forget()

    def tinsmith_drop(self, adapter_ids: list[int]) -> None:
        """Frees adapters that no request uses."""
        for adapter_id in adapter_ids:
            self.model_runner.lora_manager.remove_adapter(adapter_id)

    def _tinsmith_group(self, epoch: int) -> weights.WeightGroup:
        group = self.tinsmith_state.group
        if group is None or group.epoch != epoch:
            raise Internal(f"a worker is not in weight group {epoch}")
        return group

    def _tinsmith_received(
        self, epoch: int, layout: list[TensorSpec], checksum: int, timeout: float
    ) -> dict[str, torch.Tensor]:
        """Tensors that arrive over the weight group, checked, in host memory. Blocking."""
        with _deadline():
            buffer, arrived = self._tinsmith_group(epoch).receive(weights.nbytes(layout), timeout)
        if arrived != checksum:
            raise DataLoss("the received snapshot's checksum differs; publish it again")
        return weights.unpack(buffer, layout)

    def _tinsmith_adapter(self, adapter_id: int, rank: int, tensors: dict[str, torch.Tensor]) -> LoRAModel:
        """A LoRAModel of tensors "<module>.lora_A" [r, in] and "<module>.lora_B" [out, r], of routed experts
        with their number, or 1, before."""
        worker_manager = self.model_runner.lora_manager
        manager = worker_manager._adapter_manager
        if rank > worker_manager.lora_config.max_lora_rank:
            raise InvalidRequest(
                f"the adapter's rank is {rank}; this sampler takes up to "
                f"{worker_manager.lora_config.max_lora_rank} (--max-lora-rank)"
            )
        if any(".block_sparse_moe.experts" in module for module in manager.packed_modules):
            # vLLM has Mixtral's blocks under the name of the first files, transformers under the usual one.
            tensors = {name.replace(".mlp.", ".block_sparse_moe."): each for name, each in tensors.items()}
        renames = getattr(manager.model, "hf_to_vllm_mapper", None)
        adapter = LoRAModel.from_lora_tensors(
            adapter_id,
            {f"{_PEFT_PREFIX}{name}.weight": tensor for name, tensor in tensors.items()},
            PEFTHelper(r=rank, lora_alpha=LORA_ALPHA, target_modules=[]),
            device="cpu",
            dtype=worker_manager.lora_config.lora_dtype,
            weights_mapper=renames.get_rename_mapper() if renames is not None else None,
        )
        _leave_to_other_stages(adapter, manager.model)
        packed = {part for parts in manager.packed_modules.values() for part in parts}
        for module, lora in adapter.loras.items():
            if module not in packed and module not in manager.modules:
                raise InvalidRequest(f"the adapter has weights for {module}, which this model cannot adapt")
            if lora.lora_a is None or lora.lora_b is None or lora.lora_a.shape[-2] != rank:
                raise InvalidRequest(f"the adapter's {module} is not a pair of rank {rank} matrices")
        return adapter

    def _tinsmith_packed(self, adapter: LoRAModel) -> PackedAdapter:
        if self.device.type == "cuda":
            # Each thread has its own; page-locked memory is of one.
            torch.cuda.set_device(self.device)
        return self.tinsmith_state.runner.slots.pack(adapter)

    def _tinsmith_register(self, adapter: PackedAdapter) -> int:
        """Hands an adapter to vLLM, which has it put into a slot in the first step that uses it, or now where
        one is free. Returns its bytes."""
        self.tinsmith_state.runner.slots.register(adapter)
        return adapter.nbytes


def _leave_to_other_stages(adapter: LoRAModel, model: torch.nn.Module) -> None:
    """Drops what an adapter has for layers of other pipeline stages, whose workers look at it. What no stage
    has stays, and is refused."""
    elsewhere = tuple(get_pp_missing_layer_names(model))
    for module in [name for name in adapter.loras if f"{name}.".startswith(elsewhere)]:
        del adapter.loras[module]
