"""What vLLM is told and corrected in, on parts of its own: its sampler, masks of grammars, its settings."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import ModelRegistry, _custom_ops
from vllm.lora.layers.logits_processor import LogitsProcessorWithLoRA
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.sample import sampler as vllm_sampler
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker import gpu_model_runner

from services.sampler.config import HeadDtype, SamplerConfig
from services.sampler.engine.settings.arguments import engine_args
from services.sampler.worker.adapters import heads
from services.sampler.worker.cpu import experts, rotations
from services.sampler.worker.text import models as text_models
from services.sampler.worker.v1 import sampling
from tests.component.sampler.process import make_model

pytestmark = pytest.mark.heavy

VOCAB, TOPK = 64, 4
LOGITS = 4 * torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(1))
ALLOWED = 5
"""The only token that the grammar of the first of two requests leaves."""


class Runner:
    """What vLLM's V1 model runner has when it samples; its own functions do that with it."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.sampler = Sampler()
        self.input_batch = SimpleNamespace(
            generators={},
            num_reqs=2,
            req_ids=["constrained", "free"],
            sampling_metadata=metadata(),
            update_async_output_token_ids=lambda: None,
        )
        self.discard_request_mask = SimpleNamespace(np=np.zeros(2, bool))

    def sample_tokens(self, grammar: GrammarOutput | None) -> Any:
        """What a step samples of LOGITS. What comes behind it is left out."""
        state: Any = gpu_model_runner.ExecuteModelState
        nothing: dict[str, Any] = dict.fromkeys(state._fields)
        scheduled = SimpleNamespace(scheduled_spec_decode_tokens={})
        self.execute_model_state = state(
            **nothing | {"scheduler_output": scheduled, "logits": LOGITS.clone()}
        )
        runner: Any = self
        with pytest.raises(Sampled) as sampled:
            gpu_model_runner.GPUModelRunner.sample_tokens(runner, grammar)
        return sampled.value.output

    def _sample(self, *given: Any) -> Any:
        runner: Any = self
        raise Sampled(gpu_model_runner.GPUModelRunner._sample(runner, *given))


class Sampled(Exception):
    """Ends a step. `output`: the sampler's."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output


def metadata() -> SamplingMetadata:
    nothing = torch.zeros(2)
    return SamplingMetadata(
        temperature=None,
        all_greedy=True,
        all_random=False,
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=TOPK,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=nothing,
        presence_penalties=nothing,
        repetition_penalties=nothing,
        output_token_ids=[[], []],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )


def grammar() -> GrammarOutput:
    words = np.zeros((1, VOCAB // 32), np.int32)
    words[0, ALLOWED // 32] = 1 << (ALLOWED % 32)
    return GrammarOutput(["constrained"], words)


@pytest.fixture
def unpatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is corrected in vLLM's modules is vLLM's own again afterwards."""
    monkeypatch.setattr(gpu_model_runner, "apply_grammar_bitmask", gpu_model_runner.apply_grammar_bitmask)
    monkeypatch.setattr(vllm_sampler, "apply_bad_words", vllm_sampler.apply_bad_words)
    monkeypatch.setattr(_custom_ops, "rotary_embedding", _custom_ops.rotary_embedding)
    monkeypatch.setattr(UnquantizedFusedMoEMethod, "_setup_kernel", UnquantizedFusedMoEMethod._setup_kernel)
    create = LogitsProcessorWithLoRA.create_lora_weights
    monkeypatch.setattr(LogitsProcessorWithLoRA, "create_lora_weights", create)


@pytest.mark.usefixtures("unpatched")
def test_log_probabilities_are_the_models_own_whatever_a_grammar_leaves() -> None:
    runner = Runner()
    sampling.correct(runner)
    own = LOGITS.log_softmax(-1)
    # A step without a grammar, after one with it, takes nothing of it.
    for asked in (grammar(), None, grammar()):
        output = runner.sample_tokens(asked)
        sampled = [ALLOWED if asked else int(LOGITS[0].argmax()), int(LOGITS[1].argmax())]
        assert output.sampled_token_ids.flatten().tolist() == sampled
        told = output.logprobs_tensors.logprobs
        torch.testing.assert_close(told[:, 0], own[torch.arange(2), sampled])
        torch.testing.assert_close(told[:, 1:], own.topk(TOPK).values)


@pytest.mark.usefixtures("unpatched")
def test_without_the_correction_they_are_of_what_the_grammar_leaves() -> None:
    """When they are not, `_take_logprobs_before_the_grammar` can go."""
    told = Runner().sample_tokens(grammar()).logprobs_tensors.logprobs
    assert told[0, 0] == 0.0


def test_a_seeded_request_whose_prompt_goes_on_has_no_generator_in_the_step() -> None:
    runner, generators = Runner(), {0: torch.Generator(), 1: torch.Generator()}
    runner.input_batch.generators = dict(generators)
    runner.discard_request_mask.np[0] = True
    seen: list[dict[int, torch.Generator]] = []

    def sample_tokens(*_: Any) -> None:
        seen.append(dict(runner.input_batch.generators))

    runner.sample_tokens = sample_tokens  # type: ignore[method-assign,assignment]
    sampling._keep_generators_of_unfinished_prefills(runner)
    runner.sample_tokens(None)
    assert seen == [{1: generators[1]}]
    assert runner.input_batch.generators == generators


def test_without_the_correction_its_generator_ends_the_engine() -> None:
    runner: Any = Runner()
    runner.input_batch.generators[0] = torch.Generator()
    runner.discard_request_mask.np[0] = True
    nothing: Any = None
    with pytest.raises(RuntimeError, match="does not use offset"):
        gpu_model_runner.GPUModelRunner._bookkeeping_sync(runner, nothing, nothing, None, nothing, 0)


LARGE = 262_208
"""The vocabulary of Gemma 3."""


def head_slots(create: Callable[..., None]) -> Any:
    """A head's slots for adapters."""
    base = SimpleNamespace(vocab_size=LARGE)
    layer = SimpleNamespace(base_layer=base, hidden_size=8, device="cpu", sharded_to_full_mapping=None)
    create(layer, 3, SimpleNamespace(max_lora_rank=4, lora_dtype=torch.bfloat16))
    return layer


@pytest.mark.usefixtures("unpatched")
def test_a_head_of_any_vocabulary_has_slots_for_adapters() -> None:
    heads.correct()
    layer = head_slots(LogitsProcessorWithLoRA.create_lora_weights)
    assert (layer.lora_a_stacked.shape, layer.lora_b_stacked.shape) == ((3, 1, 4, 8), (3, 1, LARGE, 4))
    assert layer.lora_b_stacked.dtype == torch.bfloat16 and not layer.lora_b_stacked.any()
    assert layer.base_layer.vocab_size == LARGE


def test_without_the_correction_a_large_vocabulary_ends_the_engine() -> None:
    # A worker's module that another test has imported has corrected it in this process.
    own = inspect.unwrap(LogitsProcessorWithLoRA.create_lora_weights)
    with pytest.raises(ValueError, match="vocab size must be"):
        head_slots(own)


def rotated(contiguous: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Queries of two heads and keys of one as latent attention has them, rotated by vLLM's kernel, and
    without it."""
    size, positions = 16, torch.arange(3, 8)
    random = torch.Generator().manual_seed(1)
    # The last numbers of each head, of which the first have no position.
    heads = [torch.randn(len(positions), n, 8 + size, generator=random)[..., 8:] for n in (2, 1)]
    if contiguous:
        heads = [each.contiguous() for each in heads]
    angles = torch.randn(10, size // 2, generator=random)
    table = torch.cat([angles.cos(), angles.sin()], -1)
    expected = RotaryEmbedding.forward_static(
        positions, *(each.clone() for each in heads), size, size, table, False
    )
    _custom_ops.rotary_embedding(positions, *heads, size, table, False)
    return heads, list(expected)


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.usefixtures("unpatched")
def test_every_head_of_a_token_is_rotated(contiguous: bool) -> None:
    rotations.apply()
    torch.testing.assert_close(*rotated(contiguous))


@pytest.mark.usefixtures("unpatched")
def test_without_the_correction_the_first_head_is_rotated_alone() -> None:
    (queries, _), (expected, _) = rotated(contiguous=True)
    torch.testing.assert_close(queries[0, 0], expected[0, 0])
    assert (queries[0, 1] - expected[0, 1]).abs().max() > 0.1


def replaced() -> tuple[torch.Tensor, torch.Tensor]:
    """Experts' weights as vLLM has them when others were loaded in their place, and as they came."""
    came = torch.randn(2, 2 * 32, 64, generator=torch.Generator().manual_seed(1))
    layer = torch.nn.Module()
    layer.moe_config = SimpleNamespace(intermediate_size_per_partition=32, activation=MoEActivation.SILU)
    for name, tensor in (("w13_weight", came), ("w2_weight", came[:, :32].transpose(1, 2).contiguous())):
        layer.register_parameter(name, torch.nn.Parameter(tensor.clone(), requires_grad=False))
    kernel: Any = CPUUnquantizedExperts.__new__(CPUUnquantizedExperts)
    kernel.moe_config = layer.moe_config
    method: Any = UnquantizedFusedMoEMethod.__new__(UnquantizedFusedMoEMethod)
    method.unquantized_backend = UnquantizedMoeBackend.CPU
    # It is there when weights are loaded for the second time.
    method.moe_kernel = SimpleNamespace(fused_experts=kernel)
    method._setup_kernel(layer, layer.w13_weight, layer.w2_weight)
    return layer.w13_weight.data, came


@pytest.mark.usefixtures("unpatched")
def test_experts_that_are_loaded_again_are_packed_again() -> None:
    experts.apply()
    found, came = replaced()
    assert torch.equal(found, _custom_ops.cpu_prepack_moe_weight(came, "vec"))


@pytest.mark.usefixtures("unpatched")
def test_without_the_correction_they_stay_as_they_came() -> None:
    found, came = replaced()
    assert torch.equal(found, came)
    assert not torch.equal(found, _custom_ops.cpu_prepack_moe_weight(came, "vec"))


IMPORTS = """
try:
    from {own} import Qwen3_5ForCausalLM
except ImportError as error:
    print(error)
from {registered} import Qwen3_5ForCausalLM
print(Qwen3_5ForCausalLM.__base__.__module__)
"""
PICTURES = {
    "Qwen3_5ForCausalLM": "model.visual.blocks.0.attn.qkv.weight",
    "Gemma3ForCausalLM": "vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight",
}
"""What files of models that read pictures too have besides."""


@pytest.mark.parametrize("name", PICTURES)
def test_a_text_model_leaves_out_what_reads_pictures_and_vllms_own_would_not(name: str) -> None:
    text_models.register()
    registered: Any = ModelRegistry.models[name]
    found = registered.load_model_cls()
    ours, own = found.hf_to_vllm_mapper, found.__base__.hf_to_vllm_mapper
    assert ours._map_name(PICTURES[name]) is None
    assert own._map_name(PICTURES[name]) is not None
    assert ours._map_name("model.language_model.norm.weight") == "model.norm.weight"


@pytest.mark.skipif(text_models.complete(), reason="torchvision is installed, and nothing is to be corrected")
def test_a_text_model_of_qwen_3_5_is_vllms_own_without_torchvision() -> None:
    text_models.register()
    registered: Any = ModelRegistry.models["Qwen3_5ForCausalLM"]
    own = "vllm.model_executor.models.qwen3_5"
    program = IMPORTS.format(own=own, registered=registered.module_name)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    without, found = done.stdout.splitlines()[-2:]
    assert "No module named 'torchvision'" in without
    assert found == own


@pytest.mark.parametrize(("asked", "dtype"), [("auto", torch.bfloat16), ("float32", torch.float32)])
def test_the_head_computes_in_what_was_asked_for(
    tmp_path: Path, asked: HeadDtype, dtype: torch.dtype
) -> None:
    model = make_model(tmp_path / "model", tied=True)
    config = SamplerConfig("s", "a/b", str(model), tmp_path, "", dtype="bfloat16", head_dtype=asked)
    found = engine_args(config, "cpu").create_engine_config().model_config
    assert (found.head_dtype, found.dtype) == (dtype, torch.bfloat16)
