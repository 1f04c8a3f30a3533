"""For each family of models: a sampler's log-probabilities are those of transformers and PEFT in float32.

`make test-families` takes all that vLLM runs on a CPU; the suite takes one whose linears are fused and one
with routed experts. What trains is tests/unit/trainer/compute/test_models.py's.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from services.common.contract.tensors import from_values
from services.common.process import rpc
from services.launcher.tiny_model import write_tokenizer
from services.trainer.compute.data import LoraSpec
from services.trainer.compute.lora.adapter import Adapter, select_targets
from services.trainer.compute.lora.experts import find_experts
from services.trainer.compute.lora.targets import find_linears, find_unadapted
from services.trainer.files.export_format import adapter_files
from tests.component.own_redis import redis_server
from tests.component.sampler.process import (
    MODEL_ID,
    Sampler,
    floats,
    launch,
    make_full,
    prompt,
    request,
    sample,
    wait_ready,
    write_full,
)
from tests.reference import Reference
from tests.unit.trainer.compute.architectures import FLAT, SINGLE, config_of, random_model, with_pictures
from tests.unit.trainer.compute.replay.test_routers import own_choice
from tinsmith.internal.v1 import sampler_pb2_grpc

pytestmark = pytest.mark.heavy

VOCAB, HIDDEN, CONTEXT, RANK, VERSION, FULL = 512, 64, 512, 8, 1, 2
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    # The least that vLLM's attention on CPUs computes.
    "head_dim": 32,
    "max_position_embeddings": CONTEXT,
}
PICTURES = ("gemma3_text with pictures", "qwen3_5_text with pictures")
"""Whose files are those of a model that reads pictures too."""
ADAPTED = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma3_text", "qwen3_5_text", *PICTURES)
OF_EXPERTS = (
    *("qwen2_moe", "qwen3_moe", "mixtral", "gpt_oss", "glm4_moe", "deepseek_v3", "deepseek_v3 yarn"),
    "qwen3_next",
)
"""Whose adapters vLLM runs on GPUs only."""
SHORT = ("phi3", "gpt_oss", "deepseek_v3")
CHOSEN = {"": SHORT, "all": ADAPTED + OF_EXPERTS}
LATENT = {
    **FLAT["deepseek_v3"],
    # Of these sizes alone is vLLM's kernel for CPUs.
    **{"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64, "num_key_value_heads": 2},
    **{"n_routed_experts": 8, "n_group": 4, "topk_group": 2},
}
YARN = {
    "rope_parameters": {
        **{"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0},
        **{"original_max_position_embeddings": 128, "mscale": 1.0, "mscale_all_dim": 0.7},
    }
}
SETTINGS = {
    # A sampler takes none of which some layers have a window.
    "qwen3": {},
    # The first has the rotations of vLLM's kernel, the second those of PyTorch, as DeepSeek's own models do.
    "deepseek_v3": LATENT,
    "deepseek_v3 yarn": {**LATENT, **YARN},
    **{name: FLAT[name.split()[0]] for name in PICTURES},
}
KEPT = ("gpt_oss",)
"""vLLM's loader writes some of their weights past what replaces weights."""
BFLOAT16 = ("qwen3_next", "qwen3_5_text", PICTURES[1])
"""vLLM's linear attention computes in nothing else on a CPU."""


def chosen(families: tuple[str, ...]) -> list[str]:
    return [name for name in CHOSEN[os.environ.get("FAMILIES", "")] if name in families]


@dataclass
class Family:
    """A running sampler of a tiny random model, and what its numbers should be."""

    sampler: Sampler
    model: Path
    adapter: Path
    full: Path
    tolerance: float
    replaced: bool

    def scores(self, version: int) -> torch.Tensor:
        """Log-probabilities of a prompt's tokens but the first."""

        async def ask() -> torch.Tensor:
            async with rpc.channel(self.sampler.address) as channel:
                stub = sampler_pb2_grpc.SamplerServiceStub(channel)
                result = await sample(stub, request(prompt(3, 40), version, scores=True))
                return floats(result.prompt_logprobs)[1:]

        return asyncio.run(ask())

    def experts(self) -> torch.Tensor:
        """Those of a prompt's tokens, [tokens, layers, top_k], ascending as they have no order."""

        async def ask() -> torch.Tensor:
            async with rpc.channel(self.sampler.address) as channel:
                wanted = request(prompt(3, 40), max_tokens=1)
                wanted.routed_experts = True
                result = await sample(sampler_pb2_grpc.SamplerServiceStub(channel), wanted)
                told = result.sequences[0].routed_experts
                return torch.tensor(list(told.ids)).view(tuple(told.shape)).sort().values

        return asyncio.run(ask())

    def expected(self, adapter: Path | None = None) -> torch.Tensor:
        return Reference(self.model, adapter).sequence_logprobs(prompt(3, 40))

    def check_full(self) -> None:
        """All weights are replaced, or none, and the base model's come back bit for bit."""
        before, expected = self.scores(0), Reference(self.full).sequence_logprobs(prompt(3, 40))
        if not self.replaced:
            with pytest.raises(AssertionError, match="full_models_not_supported"):
                self.scores(FULL)
            return
        assert (expected - before).abs().max() > 0.1
        self.close(self.scores(FULL), expected)
        assert torch.equal(self.scores(0), before)

    def close(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=self.tolerance)


@pytest.fixture(scope="module")
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Family]:
    name = request.param
    directory = tmp_path_factory.mktemp(name.replace(" ", "-"))
    settings = SETTINGS.get(name, FLAT.get(name) or SINGLE.get(name) or {})
    model = random_model(config_of(name.split()[0], {**SIZES, **settings}), "eager")
    (with_pictures(model) if name in PICTURES else model).save_pretrained(directory / "model")
    model.save_pretrained(directory / "text")
    write_tokenizer(directory / "model", VOCAB, CONTEXT)
    spec = LoraSpec(RANK, train_mlp=not any(find_experts(model)))
    adapter = Adapter(
        spec, select_targets(find_linears(model), spec, find_unadapted(model)), "m", "cpu", HIDDEN
    )
    adapter.flat.normal_(std=0.1, generator=torch.Generator().manual_seed(2))
    named = {key: from_values(view.numpy()) for key, view in adapter.views(adapter.flat).items()}
    options = ["--max-loras", "2", "--max-lora-rank", str(RANK)]
    if name in BFLOAT16:
        options += ["--dtype", "bfloat16"]
    with redis_server(directory) as redis_url:
        sampler = launch(directory, directory / "model", redis_url, *options)
        snapshot = sampler.data_dir.snapshot(MODEL_ID, VERSION)
        snapshot.mkdir(parents=True)
        for file, write in adapter_files("org/base", spec, named).items():
            write(snapshot / file)
        full = sampler.data_dir.snapshot(MODEL_ID, FULL)
        write_full(full, directory / "text", make_full(directory / "text", FULL))
        try:
            tolerance = 0.15 if name in BFLOAT16 else 2e-4
            yield Family(wait_ready(sampler), directory / "text", snapshot, full, tolerance, name not in KEPT)
        finally:
            sampler.stop()


@pytest.mark.parametrize("family", chosen(ADAPTED), indirect=True)
def test_a_sampler_computes_what_transformers_and_peft_compute(family: Family) -> None:
    base, adapted = family.expected(), family.expected(family.adapter)
    assert (adapted - base).abs().max() > 0.1
    family.close(family.scores(0), base)
    family.close(family.scores(VERSION), adapted)
    family.check_full()


@pytest.mark.parametrize("family", chosen(OF_EXPERTS), indirect=True)
def test_of_routed_experts_it_computes_the_base_model_tells_them_and_refuses_adapters(family: Family) -> None:
    family.close(family.scores(0), family.expected())
    # In bfloat16 rounding decides now and then.
    if family.tolerance < 0.01:
        chosen = own_choice(Reference(family.model).model, torch.tensor(prompt(3, 40)))
        assert torch.equal(family.experts(), chosen.sort().values.long())
    with pytest.raises(AssertionError, match="adapters_not_supported"):
        family.scores(VERSION)
    family.check_full()
