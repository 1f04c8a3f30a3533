"""An adapter is made ready beside the engine's thread, and takes no slot from one that runs."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from vllm.config import set_current_vllm_config
from vllm.distributed import (
    cleanup_dist_env_and_memory,
    destroy_model_parallel,
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.lora import lora_model, model_manager
from vllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from vllm.model_executor.model_loader.utils import initialize_model

from services.sampler.config import SamplerConfig
from services.sampler.engine.settings.arguments import engine_args
from services.sampler.worker.adapters.slots import WorkerSlots
from services.sampler.worker.extension import WorkerExtension
from services.sampler.worker.jobs import Outcome
from tests.component.sampler.process import make_adapter, make_model, write_snapshot

pytestmark = pytest.mark.heavy

SLOTS, RANK = 2, 8
SCALE = 32 / RANK
DOWN = "model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """vLLM's manager of adapters of a real model, without an engine. What other tests have in this process
    stays: a process group of theirs is used and left, and of the environment nothing remains."""
    environment, others = dict(os.environ), dist.is_initialized()
    directory = tmp_path_factory.mktemp("model")
    model_dir = make_model(directory / "model", tied=False)
    wanted = SamplerConfig(
        "sampler-0", "org/model", str(model_dir), directory, "redis://", max_loras=SLOTS, max_lora_rank=16
    )
    config = engine_args(wanted, "cpu").create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{directory}/store", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        made = LRUCacheWorkerLoRAManager(config, torch.device("cpu"), {})
        made.create_lora_manager(initialize_model(vllm_config=config), config)
        with pytest.MonkeyPatch.context() as on_a_gpu:
            # vLLM would page-lock each part of an adapter, for which torch needs a device.
            for module in (lora_model, model_manager):
                on_a_gpu.setattr(module, "PIN_MEMORY", True)
            made.slots = WorkerSlots(made, staged=False)
            made.slots.install()
            yield made
    if others:
        destroy_model_parallel()
    else:
        cleanup_dist_env_and_memory()
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)


class Worker(WorkerExtension):
    """A worker with the manager, whose jobs tell what became of them here."""

    def __init__(self, manager: Any) -> None:
        self.rank, self.device = 0, torch.device("cpu")
        self.model_runner = SimpleNamespace(lora_manager=manager)
        self.told: dict[str, Outcome] = {}
        self._told = threading.Event()
        runner = SimpleNamespace(slots=manager.slots)
        self.tinsmith_state: Any = SimpleNamespace(jobs={}, reporter=self, runner=runner)

    def tell(self, job: str, outcome: Outcome) -> None:
        self.told[job] = outcome
        self._told.set()

    def load(self, adapter_id: int, directory: Path) -> Outcome:
        """Starts to load an adapter, and waits until that is done."""
        self._told.clear()
        self.tinsmith_load(f"load-{adapter_id}", adapter_id, str(directory))
        assert self._told.wait(60)
        return self.told[f"load-{adapter_id}"]

    def register(self, adapter_id: int) -> Outcome:
        return self.tinsmith_finish(f"load-{adapter_id}")


@pytest.fixture
def worker(manager: Any) -> Iterator[Worker]:
    yield Worker(manager)
    manager.remove_all_adapters()


def active(manager: Any) -> list[int]:
    """Adapters in slots, least recently used first, as vLLM's next step finds them."""
    return list(manager._adapter_manager._active_adapters)


def in_slot(manager: Any, adapter_id: int) -> dict[str, list[tuple[torch.Tensor, torch.Tensor]]]:
    """A and B of each part of each layer, as a step computes with them."""
    slot = manager._adapter_manager.lora_index_to_id.index(adapter_id)
    return {
        name: [
            (a.clone(), b.clone())
            for a, b in zip(
                _slots(layer.lora_a_stacked, slot), _slots(layer.lora_b_stacked, slot), strict=True
            )
        ]
        for name, layer in manager._adapter_manager.modules.items()
    }


def _slots(stacked: Any, slot: int) -> list[torch.Tensor]:
    return [each[slot, 0] for each in ([stacked] if torch.is_tensor(stacked) else stacked)]


def test_an_adapter_that_comes_takes_a_free_slot_and_where_there_is_none_those_that_run_keep_theirs(
    manager: Any, worker: Worker, tmp_path: Path
) -> None:
    for adapter_id in (11, 12, 13):
        write_snapshot(tmp_path / str(adapter_id), make_adapter(adapter_id, RANK), RANK)
        assert worker.load(adapter_id, tmp_path / str(adapter_id)) == ["done"]
        assert worker.register(adapter_id)[0] == "ok"
    assert active(manager) == [11, 12]
    assert manager.list_adapters() == {11, 12, 13}
    # In the first step with a request for it vLLM has it take the place of what was used least recently.
    manager.set_active_adapters({LoRARequest("13", 13, str(tmp_path))}, None)
    assert active(manager) == [12, 13]
    worker.tinsmith_drop([12])
    write_snapshot(tmp_path / "14", make_adapter(14, RANK), RANK)
    assert (worker.load(14, tmp_path / "14"), worker.register(14)[0]) == (["done"], "ok")
    assert active(manager) == [13, 14]


def test_a_step_copies_only_what_is_in_no_slot(manager: Any, worker: Worker, tmp_path: Path) -> None:
    for adapter_id in (11, 12, 13):
        write_snapshot(tmp_path / str(adapter_id), make_adapter(adapter_id, RANK), RANK)
        worker.load(adapter_id, tmp_path / str(adapter_id))
        worker.register(adapter_id)
    assert manager._adapter_manager.lora_index_to_id == [11, 12]
    step = [LoRARequest(str(adapter_id), adapter_id, str(tmp_path)) for adapter_id in (13, 11)]
    manager.set_active_adapters(step, None)
    assert manager._adapter_manager.lora_index_to_id == [11, 13]


@pytest.mark.parametrize("full", [False, True])
def test_what_is_in_a_slot_is_the_adapter_with_its_scale_whenever_it_came_there(
    manager: Any, worker: Worker, tmp_path: Path, full: bool
) -> None:
    tensors = make_adapter(5, RANK)
    write_snapshot(tmp_path / "5", tensors, RANK)
    if full:
        for other in (21, 22):
            write_snapshot(tmp_path / str(other), make_adapter(other, 16), 16)
            worker.load(other, tmp_path / str(other))
            worker.register(other)
    worker.load(5, tmp_path / "5")
    assert worker.register(5) == ["ok", sum(tensor.nbytes for tensor in tensors.values())]
    manager.set_active_adapters({LoRARequest("5", 5, str(tmp_path))}, None)
    layers = in_slot(manager, 5)
    for name, parts in PARTS.items():
        for part, (a, b) in zip(parts, layers[name], strict=True):
            want_a, want_b = tensors[f"{part}.lora_A"], tensors[f"{part}.lora_B"] * SCALE
            assert torch.equal(a[:RANK], want_a) and a[RANK:].count_nonzero() == 0
            assert torch.equal(b[: len(want_b), :RANK], want_b) and b[:, RANK:].count_nonzero() == 0
    assert set(layers) == set(PARTS)


def _parts() -> dict[str, list[str]]:
    parts = {"lm_head": ["lm_head"]}
    for layer in (f"model.layers.{number}" for number in range(2)):
        parts |= {f"{layer}.{name}": [f"{layer}.{name}"] for name in ("self_attn.o_proj", "mlp.down_proj")}
        parts[f"{layer}.self_attn.qkv_proj"] = [f"{layer}.self_attn.{part}_proj" for part in "qkv"]
        parts[f"{layer}.mlp.gate_up_proj"] = [f"{layer}.mlp.{part}_proj" for part in ("gate", "up")]
    return parts


PARTS = _parts()
"""The layers of vLLM, and which of the trainer's are theirs, in order."""


def test_the_engines_thread_scales_and_packs_nothing(
    manager: Any, worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def noted(of: Callable[..., Any]) -> Callable[..., Any]:
        def note(*args: Any, **kwargs: Any) -> Any:
            threads.append(threading.current_thread().name)
            return of(*args, **kwargs)

        return note

    for kind in (LoRALayerWeights, PackedLoRALayerWeights):
        monkeypatch.setattr(kind, "optimize", noted(kind.optimize))
    write_snapshot(tmp_path / "5", make_adapter(5, RANK), RANK)
    worker.load(5, tmp_path / "5")
    worker.register(5)
    assert active(manager) == [5]
    assert set(threads) == {"load-5"}


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (f"{DOWN}.lora_A", (RANK, 999)),
        (f"{DOWN}.lora_B", (65, RANK)),
        ("model.layers.1.self_attn.k_proj.lora_A", (RANK, 65)),
        ("model.layers.1.self_attn.v_proj.lora_B", (33, RANK)),
        ("model.layers.1.mlp.up_proj.lora_B", (129, RANK)),
        ("lm_head.lora_B", (100_000, RANK)),
    ],
)
@pytest.mark.parametrize("full", [False, True])
def test_an_adapter_that_does_not_fit_is_refused_before_the_engine_hears_of_it(
    manager: Any, worker: Worker, tmp_path: Path, name: str, shape: tuple[int, int], full: bool
) -> None:
    for other in (21, 22) if full else ():
        write_snapshot(tmp_path / str(other), make_adapter(other, RANK), RANK)
        worker.load(other, tmp_path / str(other))
        worker.register(other)
    before = {other: in_slot(manager, other) for other in active(manager)}
    write_snapshot(tmp_path / "6", make_adapter(6, RANK) | {name: torch.ones(shape)}, RANK)
    kind, code, category, message = worker.load(6, tmp_path / "6")
    assert (kind, code, category) == ("error", "invalid_request", "user")
    assert message.startswith("the adapter does not fit this model: ")
    assert manager.list_adapters() == set(before)
    for other, layers in before.items():
        for layer, parts in in_slot(manager, other).items():
            for (a, b), (known_a, known_b) in zip(parts, layers[layer], strict=True):
                assert torch.equal(a, known_a) and torch.equal(b, known_b)


def test_an_adapter_of_which_a_pipeline_stage_has_no_layer_is_taken(
    manager: Any, worker: Worker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        "services.sampler.worker.extension.get_pp_missing_layer_names", lambda _: ["lm_head."]
    )
    write_snapshot(tmp_path / "7", make_adapter(7, RANK, attn=False, mlp=False), RANK)
    assert worker.load(7, tmp_path / "7") == ["done"]
    assert worker.register(7) == ["ok", 0]
    assert all(a.count_nonzero() == 0 for parts in in_slot(manager, 7).values() for a, _ in parts)
