"""What vLLM does by itself where a sampler corrects it. A test that fails says that a version of vLLM does it
otherwise: then look whether the correction that it names can go.

As far as vLLM's own code runs here it is run; kernels for GPUs are read. test_experts_still_needed.py,
test_fixes.py, test_drafts.py, test_cpu_adapters.py, test_full_weights.py, and the unit tests of adapters'
slots, schemas and patterns have the rest.
"""

from __future__ import annotations

import ast
import threading
from collections.abc import Callable, Iterator
from dataclasses import fields
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from prometheus_client import REGISTRY
from vllm import SamplingParams
from vllm.config import speculative
from vllm.config.model import LogprobsMode
from vllm.lora.layers import LoRAMapping
from vllm.lora.model_manager import AdapterLRUCache, LRUCacheLoRAModelManager
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from vllm.outputs import WeightVersionSpan
from vllm.utils import mem_utils
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.core import EngineCore
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import LogprobsLists
from vllm.v1.sample.sampler import Sampler
from vllm.v1.serial_utils import MsgpackEncoder
from vllm.v1.structured_output.backend_types import StructuredOutputOptions
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu import lora_utils, model_runner
from vllm.v1.worker.gpu.sample import prompt_logprob
from vllm.v1.worker.gpu.sample import sampler as sampler_v2

from services.sampler.config import SamplerConfig
from services.sampler.engine.engine_stats import EngineStats
from services.sampler.engine.logprobs.core import StepRows, pack
from services.sampler.engine.settings.arguments import engine_args
from tests.component.sampler.process import make_model
from tests.unit.sampler.worker.written import written

pytestmark = pytest.mark.heavy

VOCAB, WIDTH, RANK = 16, 8, 2
PROMPT = 5
"""Tokens of each of two requests, of which a step computes all."""
BOTH = (11, 22)
"""Their adapters."""
HIDDEN = torch.randn(2 * PROMPT, WIDTH, generator=torch.Generator().manual_seed(1))
HEAD = torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(2))


class Step:
    """The head of a model with adapters, after the step of both requests began, on a CPU by vLLM's own
    functions for adapters."""

    def __init__(self) -> None:
        self.scored: list[int] = []
        """Rows of each time that it was asked for logits."""
        self._adapters = PunicaWrapperCPU(64, 64, torch.device("cpu"))
        rows = tuple(adapter for adapter in BOTH for _ in range(PROMPT))
        self._adapters.update_metadata(LoRAMapping(rows, BOTH), list(BOTH), len(BOTH), VOCAB)
        self._a, self._b = torch.ones(2, 1, RANK, WIDTH), torch.ones(2, 1, VOCAB, RANK)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.scored.append(len(hidden))
        logits = hidden @ HEAD.T
        self._adapters.add_lora_logits(logits, hidden, self._a, self._b, 1.0)
        return logits


def test_v1_scores_a_prompts_rows_with_the_adapters_of_the_rows_that_are_sampled() -> None:
    """worker/v1/prompt_scorer.py (vllm-project/vllm#16668, #51594)."""
    model = Step()
    runner: Any = SimpleNamespace(
        num_prompt_logprobs={"one": 1},
        requests={
            "one": SimpleNamespace(
                prompt_token_ids=list(range(PROMPT)),
                num_computed_tokens=0,
                in_progress_prompt_logprobs_cpu=None,
            )
        },
        input_batch=SimpleNamespace(req_id_to_index={"one": 0}),
        query_start_loc=SimpleNamespace(np=np.array([0, PROMPT, 2 * PROMPT])),
        model=model,
        model_config=SimpleNamespace(logprobs_mode="raw_logprobs"),
        sampler=Sampler(),
        device=torch.device("cpu"),
    )
    # Two rows are sampled, and four are to be scored.
    with pytest.raises(RuntimeError, match="does not broadcast"):
        gpu_model_runner.GPUModelRunner._get_prompt_logprobs_dict(runner, HIDDEN, {"one": PROMPT})
    assert model.scored == [PROMPT - 1]


def prompt_step() -> Any:
    """That step, as V2 has it."""
    return SimpleNamespace(
        req_ids=["one", "two"],
        idx_mapping=torch.arange(2),
        idx_mapping_np=np.arange(2),
        num_computed_prefill_tokens_np=np.zeros(2, int),
        num_scheduled_tokens=np.full(2, PROMPT),
        prefill_len_np=np.full(2, PROMPT),
        query_start_loc=torch.arange(3) * PROMPT,
        query_start_loc_np=np.arange(3) * PROMPT,
        num_tokens=2 * PROMPT,
    )


def test_v2_scores_them_so_too_and_with_prompt_logprobs_those_of_all_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """worker/v2/prompt_scorer.py (the same reports)."""
    asked = "self.prompt_logprobs_worker.compute_prompt_token_id_logprobs"
    (call,) = written("vllm.v1.worker.gpu.model_runner").calls(asked)
    # No adapter is mapped in between.
    assert ast.unparse(call.args[0]) == "self.model.compute_logits"
    worker, prompts = prompt_logprob.PromptLogprobsWorker(2, torch.device("cpu")), np.full(2, PROMPT)
    ids = np.zeros((PROMPT - 1, 1), np.int64)
    worker.add_request("one", 0, SamplingParams(prompt_logprob_token_ids=ids))
    model = Step()
    with pytest.raises(RuntimeError, match="does not broadcast"):
        worker.compute_prompt_token_id_logprobs(model.compute_logits, HIDDEN, prompt_step(), prompts)
    worker.add_request("one", 0, SamplingParams(prompt_logprobs=0))
    nothing: Any = None
    monkeypatch.setattr(prompt_logprob, "get_prompt_logprobs_token_ids", lambda *_: torch.zeros(2 * PROMPT))
    with pytest.raises(RuntimeError, match="does not broadcast"):
        worker.compute_prompt_logprobs(model.compute_logits, HIDDEN, prompt_step(), nothing, nothing, prompts)
    assert model.scored == [PROMPT - 1, 2 * PROMPT]


def test_v2_masks_by_a_grammar_the_logits_of_which_it_tells_log_probabilities(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """worker/v2/grammar.py."""

    def mask(logits: torch.Tensor, *_: Any) -> None:
        logits[:, 1:] = -torch.inf

    batch = SimpleNamespace(
        logits_indices=torch.arange(2),
        idx_mapping_np=np.arange(2),
        cu_num_logits_np=np.arange(3),
        num_reqs=2,
        num_draft_tokens=0,
        seq_lens_cpu_upper_bound=torch.ones(2),
        seq_lens=torch.ones(2),
        positions=torch.zeros(2),
        input_ids=torch.zeros(2),
        expanded_idx_mapping=torch.arange(2),
        idx_mapping=torch.arange(2),
        expanded_local_pos=torch.zeros(2),
        cu_num_logits=torch.arange(3),
    )
    told: list[torch.Tensor] = []
    own: Any = sampler_v2.Sampler.__new__(sampler_v2.Sampler)
    vars(own).update(
        compute_nans=False,
        logprobs_mode="raw_logprobs",
        trace_replay_state=None,
        return_sampling_mask=False,
        logprob_token_ids_state=None,
        get_logprobs_dims=lambda _: (0, 0),
        sample=lambda logits, *_, **__: (logits.argmax(-1), logits),
        req_states=SimpleNamespace(prefill_len=SimpleNamespace(gpu=None)),
    )
    monkeypatch.setattr(sampler_v2, "compute_topk_scores", lambda logits, *_, **__: told.append(logits))
    monkeypatch.setattr(sampler_v2, "get_num_sampled_and_rejected", lambda *_: (None, None))
    runner: Any = SimpleNamespace(
        batch_sharder=None,
        model=SimpleNamespace(compute_logits=lambda hidden: hidden @ HEAD.T),
        structured_outputs_worker=SimpleNamespace(apply_grammar_bitmask=mask),
        rejection_sampler=None,
        sampler=own,
    )
    grammar: Any = SimpleNamespace(
        structured_output_request_ids=["one", "two"], grammar_bitmask=None, num_acceptable_drafts=None
    )
    given: Any = batch
    model_runner.GPUModelRunner.sample(runner, HIDDEN[:2], given, grammar)
    (logits,) = told
    assert logits[:, 1:].isneginf().all()


def test_v2_checks_drafts_by_chance_and_maps_one_row_of_each_request() -> None:
    """worker/v2/drafts.py. It had one, "strict", until vllm-project/vllm#40651."""
    assert set(get_args(speculative.RejectionSampleMethod)) == {"standard", "synthetic", "block"}
    state = lora_utils.LoraState(2)
    for index, adapter in enumerate(BOTH):
        state.add_request(str(index), index, LoRARequest(str(adapter), adapter, "nowhere"))
    # Two drafts behind the first one's token, and one behind the other's.
    rows, *_ = state.make_lora_inputs(["0", "1"], np.arange(2), np.array([3, 2]))
    assert rows == BOTH


def test_no_request_says_for_itself_of_what_its_log_probabilities_are() -> None:
    """worker/v1/sampled_logprobs.py and worker/v2/sampled_logprobs.py. vllm-project/vllm#21398 made it a
    setting of the engine."""
    told = {field for field in SamplingParams.__struct_fields__ if "logprob" in field}
    assert told == {
        *("logprobs", "prompt_logprobs", "prompt_logprob_token_ids", "prompt_logprob_start"),
        *("logprob_token_ids", "flat_logprobs"),
    }
    modes = {"raw_logits", "raw_logprobs", "processed_logits", "processed_logprobs"}
    assert set(get_args(LogprobsMode)) == modes


def slots(*active: int) -> Any:
    """vLLM's own manager of the adapters of a worker, all of which it knows, with these in its slots."""
    manager: Any = LRUCacheLoRAModelManager.__new__(LRUCacheLoRAModelManager)
    config = SimpleNamespace(max_loras=len(active), max_cpu_loras=9)
    vars(manager).update(lora_config=config, modules={}, lora_index_to_id=[None] * len(active))
    manager._registered_adapters = AdapterLRUCache(9, lambda _: None)
    manager._active_adapters = AdapterLRUCache(len(active), manager._deactivate_adapter)
    made: Any = LRUCacheWorkerLoRAManager.__new__(LRUCacheWorkerLoRAManager)
    made._adapter_manager = manager
    for adapter in (*active, 33):
        manager._registered_adapters[adapter] = SimpleNamespace(id=adapter)
    for adapter in active:
        manager.activate_adapter(adapter)
    return made


@pytest.mark.parametrize("first", [11, 33])
def test_an_adapter_that_comes_pushes_out_one_of_the_same_step_if_it_comes_first(first: int) -> None:
    """`in_order` in worker/adapters/slots.py (vllm-project/vllm#14497, closed)."""
    worker, step = slots(11, 22), sorted((11, 33), key=lambda adapter: adapter != first)
    worker._apply_adapters([LoRARequest(str(adapter), adapter, "nowhere") for adapter in step])
    # Each move is a copy in front of the step; 11 had a slot, and was to keep it.
    moved = {11: [11, 33], 33: [33, 11]}[first]
    assert worker._adapter_manager.lora_index_to_id == moved


def test_vllm_counts_as_its_own_what_others_take_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """worker/gpu/memory.py (vllm-project/vllm#18854; #55828 would count a process's own)."""
    gib, free = 2**30, iter([60, 60, 35])
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.accelerator, name, lambda *_: None)
    monkeypatch.setattr(torch.accelerator, "memory_stats", lambda _: {})
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda _: (next(free) * gib, 80 * gib))
    # Torch has taken nothing; another process has taken all that is less free.
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda _: 0)
    before = mem_utils.MemorySnapshot(device="cpu")
    with mem_utils.memory_profiling(before) as found:
        pass
    assert found.total_consumed == 25 * gib
    # How it would be told of another number: on AMD's GPUs alone, and only where more is free than before.
    own = written("vllm.v1.worker.gpu_worker").text
    assert "if profile_result.total_consumed >= 0 or not current_platform.is_rocm():" in own
    assert "assert init_free_memory >= free_gpu_memory" in own
    assert "result.total_consumed = result.before_create.free_memory - result.after_profile.free_memory" in (
        written("vllm.utils.mem_utils").text
    )


def test_the_kernels_of_adapters_multiply_a_slot_by_its_elements_in_32_bits() -> None:
    """worker/head_slots.py. vllm-project/vllm#53034 widened rows, and #53038, which was not merged, slots."""
    for name in ("shrink", "expand"):
        kernel = written(f"vllm.lora.ops.triton_ops.lora_{name}_op").text
        assert "lora_id = tl.load(lora_ids + lora_idx)\n" in kernel
        assert "lora_id.to(" not in kernel
    both = written("vllm.lora.ops.triton_ops.kernel_utils").text
    assert "cur_lora_ptr + lora_d0_stride * lora_index + " in both
    assert "cur_lora_ptr + cur_lora_d0_stride * lora_index + " in both
    ids = written("vllm.lora.ops.triton_ops.lora_kernel_metadata").text
    assert "active_lora_ids = torch.empty(max_loras + 1, dtype=torch.int32, device=device)" in ids


def test_vllm_waits_for_the_grammar_of_a_schema_as_long_as_it_takes() -> None:
    """engine/grammars/core.py (vllm-project/vllm#54003). What it may give up is made in another thread."""
    makers: list[threading.Thread] = []

    def make(*_: Any, **__: Any) -> None:
        makers.append(threading.current_thread())
        raise NotImplementedError

    backend: Any = XgrammarBackend.__new__(XgrammarBackend)
    compiler = SimpleNamespace(compile_json_schema=make, compile_regex=make, compile_structural_tag=make)
    vars(backend).update(compiler=compiler, disable_any_whitespace=False)
    options = StructuredOutputOptions
    for kind in (options.JSON, options.STRUCTURAL_TAG, options.REGEX):
        with pytest.raises(NotImplementedError):
            backend.compile_grammar(kind, "{}")
    assert [maker is threading.current_thread() for maker in makers] == [True, True, False]


def test_vllms_versions_of_weights_are_of_a_whole_engine_and_do_not_say_what_was_kept() -> None:
    """engine/shifts (vllm-project/vllm#49040; #54443 is about saying more)."""
    assert [field.name for field in fields(WeightVersionSpan)] == ["version", "start", "end"]
    assert "weight_version" in EngineCoreOutputs.__struct_fields__
    assert not {name for name in EngineCoreOutput.__struct_fields__ if "version" in name}
    assert list(signature(EngineCore.set_weight_version).parameters) == ["self", "weight_version"]


@pytest.fixture
def registry_as_it_was() -> Iterator[None]:
    known = vllms()
    yield
    # A logger takes away what another had registered.
    for collector in vllms():
        REGISTRY.unregister(collector)
    for collector in known:
        REGISTRY.register(collector)


def vllms() -> list[Any]:
    """What vLLM has registered."""
    every = REGISTRY._collector_to_names.items()
    return [collector for collector, names in every if any(name.startswith("vllm:") for name in names)]


@pytest.mark.usefixtures("registry_as_it_was")
@pytest.mark.parametrize(("logger", "kept"), [(PrometheusStatLogger, 5), (EngineStats, 0)])
def test_vllms_gauge_of_adapters_keeps_each_that_ever_ran(
    logger: Callable[..., Any], kept: int, tmp_path: Path
) -> None:
    """EngineStats in engine/engine_stats.py."""
    model = make_model(tmp_path / "model", tied=True)
    config = engine_args(SamplerConfig("s", "a/b", str(model), tmp_path, ""), "cpu").create_engine_config()
    stats = logger(config, [0])
    for adapter in map(str, range(5)):
        stats.record(SchedulerStats(running_lora_adapters={adapter: 1}), None)
    names = [sample.name for metric in REGISTRY.collect() for sample in metric.samples]
    assert names.count("vllm:lora_requests_info") == kept


SAMPLED = {f"00000000-0000-0000-0000-{index:012d}": 50_000 + index for index in range(1024)}
"""The tokens of a step, of as many requests."""


def sent(rows: LogprobsLists | None) -> int:
    """Bytes of the step's outputs, which have what is theirs of these rows, by vLLM's encoder."""
    outputs = [EngineCoreOutput(name, [token]) for name, token in SAMPLED.items()]
    for index, output in enumerate(outputs if rows is not None else ()):
        output.new_logprobs = rows and rows.slice_request(index, 1)
    if isinstance(rows, StepRows):
        pack(outputs, rows, rows.held)
    message = MsgpackEncoder().encode(EngineCoreOutputs(outputs=outputs))
    return sum(memoryview(part).nbytes for part in message)


def test_vllm_sends_arrays_with_each_token_and_a_sampler_its_number_alone() -> None:
    """engine/logprobs (no upstream report found; a comment at vLLM's EngineCoreOutputs considers columns)."""
    ids, count = np.array(list(SAMPLED.values()), np.int32), len(SAMPLED)
    own = LogprobsLists(ids[:, None], np.ones((count, 1), np.float32), np.ones(count, np.int64))
    asks = SimpleNamespace(sampling_params=SamplingParams(logprobs=0))
    ours = StepRows(*own)
    ours.begin(list(SAMPLED), dict.fromkeys(SAMPLED, asks))
    # A float and how many there are, and once what is around them.
    assert sent(ours) - sent(None) <= count * 6 + 100
    assert sent(own) - sent(None) >= count * 30
