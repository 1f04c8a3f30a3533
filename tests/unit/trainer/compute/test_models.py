"""For each family of models: what an adapter trains is what its flags promise, as plain PyTorch would.

`make models` writes docs/models.md, which says what was found.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from services.common.contract.errors import InvalidRequest
from services.common.contract.tensors import from_values
from services.trainer.compute.attention import FLAT_ATTENTION, Sequences, register
from services.trainer.compute.base_model import Scorer
from services.trainer.compute.data import LoraSpec
from services.trainer.compute.logprobs import Targets
from services.trainer.compute.lora.adapter import Adapter, kind_of, largest, promised_by, select_targets
from services.trainer.compute.lora.grouped import LoraRouter
from services.trainer.compute.lora.stack import Segment
from services.trainer.compute.lora.targets import find_linears, find_unadapted, hook_adapters
from services.trainer.compute.split.asked import Asked, splits
from services.trainer.files.export_format import adapter_files
from tests.unit.trainer.compute.architectures import FLAT, config_of, random_model
from tests.unit.trainer.compute.plain import adapted

PAGE = Path(__file__).parents[4] / "docs" / "models.md"
WRITE = "TINSMITH_WRITE_MODELS"
BEGIN, END = "<!-- found by the test -->\n", "<!-- end -->\n"

FAMILIES = {
    "Llama 2, 3": "llama",
    "Mistral": "mistral",
    "Qwen2, Qwen2.5": "qwen2",
    "Qwen3": "qwen3",
    "Phi-3, Phi-4": "phi3",
    "Gemma 3 (text)": "gemma3_text",
    "Qwen2-MoE": "qwen2_moe",
    "Qwen3-MoE": "qwen3_moe",
    "Mixtral": "mixtral",
    "GPT-OSS": "gpt_oss",
    "GLM-4-MoE (4.5, 4.6)": "glm4_moe",
    "DeepSeek-V3, R1": "deepseek_v3",
    "Qwen3-Next": "qwen3_next",
    "Qwen3.5": "qwen3_5_text",
    "Qwen3.5-MoE": "qwen3_5_moe_text",
}
WITH_EXPERTS = (
    *("qwen2_moe", "qwen3_moe", "mixtral", "gpt_oss", "glm4_moe", "deepseek_v3"),
    *("qwen3_next", "qwen3_5_moe_text"),
)
FLAGS = ("train_attn", "train_mlp", "train_unembed")
LENGTHS = (9, 6)


@dataclass
class Trained:
    """A family's tiny model with the hooks of the trainer.

    Attributes:
        plain: the same weights in the library's own module.
    """

    model: Any
    plain: Any
    router: LoraRouter
    scorer: Scorer

    @classmethod
    def of(cls, model_type: str) -> Trained:
        register()
        config = config_of(model_type, FLAT[model_type])
        model = random_model(config, FLAT_ATTENTION).requires_grad_(False)
        plain = random_model(config, "eager").requires_grad_(False)
        plain.load_state_dict(model.state_dict())
        router = LoraRouter()
        hook_adapters(model, router)
        return cls(model, plain, router, Scorer(model, router, detached=False))

    def targets(self, spec: LoraSpec) -> Mapping[str, Any]:
        return select_targets(find_linears(self.model), spec, find_unadapted(self.model))

    def flags(self) -> dict[str, str]:
        """Of each flag, why it is refused; empty: it is not."""
        found = {}
        for flag in FLAGS:
            spec = LoraSpec(4, **{each: each == flag for each in FLAGS})
            try:
                self.targets(spec)
                found[flag] = ""
            except InvalidRequest as error:
                found[flag] = error.message
        return found

    def spec(self) -> LoraSpec:
        """All that can be trained."""
        return LoraSpec(4, **{flag: not refused for flag, refused in self.flags().items()})

    def adapter(self, name: str, **flags: bool) -> Adapter:
        spec = msgspec.structs.replace(self.spec(), **flags)
        made = Adapter(spec, self.targets(spec), name, "cpu", self.model.config.hidden_size)
        made.flat.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
        return made

    def asked(self) -> list[Asked]:
        """What each layer asks of attention."""
        asked: list[Asked] = []
        tokens = torch.ones(1, 1, dtype=torch.int64)
        sequences = replace(Sequences.of([1], "cpu"), asked=asked)
        self.scorer(tokens, Targets(tokens[0], ((1, 1),)), sequences)
        return asked

    def pass_(self, adapters: Sequence[Adapter], parts: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Log-probabilities of the tokens after each, and the gradient of their sum, of each adapter."""
        gradients = [torch.zeros_like(each.flat) for each in adapters]
        tokens = torch.cat(list(parts))[None]
        lengths = [len(part) for part in parts]
        wanted = Targets(torch.cat([part.roll(-1) for part in parts]), ((tokens.shape[1], 1),))
        segments = [Segment(*each) for each in zip(lengths, adapters, gradients, strict=True)]
        with self.router.route(segments):
            logprobs, _ = self.scorer(tokens, wanted, Sequences.of(lengths, "cpu"))
            logprobs.sum().backward()
        return logprobs.detach(), gradients


def logprobs_of(model: Any, tokens: Tensor) -> Tensor:
    logits = model(tokens[None], use_cache=False).logits[0].float()
    return logits.log_softmax(-1).gather(-1, tokens.roll(-1)[:, None])[:, 0]


@pytest.fixture(scope="module", params=FAMILIES.values(), ids=list(FAMILIES.values()))
def trained(request: pytest.FixtureRequest) -> Trained:
    return Trained.of(request.param)


@pytest.fixture(scope="module")
def parts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(1, 64, (length,), generator=generator) for length in LENGTHS]


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4 * max(1.0, float(expected.abs().max())))


def test_every_weight_that_a_flag_promises_is_adapted_or_the_flag_is_refused(trained: Trained) -> None:
    refused, targets = trained.flags(), trained.targets(trained.spec())
    for name, weight in trained.model.named_parameters():
        module, flags = name.rpartition(".")[0], promised_by(name)
        left_out = isinstance(trained.model.get_submodule(module), nn.Conv1d | nn.Embedding)
        if weight.dim() < 2 or left_out or not flags:
            continue
        if name.endswith("_bias"):
            # One of each expert.
            continue
        found = module in targets or f"{module}.w1" in targets
        assert found or all(refused[flag] for flag in flags), f"{name} is promised by {flags} and not adapted"
    assert not refused["train_attn"] and not refused["train_unembed"]


def test_the_largest_adapter_is_one_that_the_base_model_takes(trained: Trained) -> None:
    found = largest(find_linears(trained.model), 4, find_unadapted(trained.model))
    assert {flag for flag in FLAGS if getattr(found, flag)} == {
        flag for flag, refused in trained.flags().items() if not refused
    }
    assert trained.targets(found)


def test_gradients_are_those_of_plain_pytorch(trained: Trained, parts: list[Tensor]) -> None:
    adapter = trained.adapter("a")
    logprobs, (gradient,) = trained.pass_([adapter], parts[:1])
    model, matrices = adapted(trained.plain, adapter)
    expected = logprobs_of(model, parts[0])
    expected.sum().backward()
    close(logprobs, expected.detach())
    found = adapter.views(gradient)
    assert found.keys() == matrices.keys()
    for name, values in matrices.items():
        assert values.grad is not None
        close(found[name], values.grad)


def test_two_tenants_together_equal_each_alone(trained: Trained, parts: list[Tensor]) -> None:
    adapters = [trained.adapter("a"), trained.adapter("bb")]
    alone = [trained.pass_([each], [part]) for each, part in zip(adapters, parts, strict=True)]
    logprobs, gradients = trained.pass_(adapters, parts)
    close(logprobs, torch.cat([each for each, _ in alone]))
    for together, (_, (apart,)) in zip(gradients, alone, strict=True):
        assert apart.any()
        close(together, apart)


def exported(trained: Trained, adapter: Adapter, directory: Path) -> Path:
    named = {name: from_values(view.numpy()) for name, view in adapter.views(adapter.flat).items()}
    directory.mkdir()
    for name, write in adapter_files("org/base", adapter.spec, named).items():
        write(directory / name)
    return directory


def test_an_export_computes_the_same_in_peft(trained: Trained, parts: list[Tensor], tmp_path: Path) -> None:
    from peft import PeftModel

    adapter = trained.adapter("a", train_mlp=trained.plain.config.model_type not in WITH_EXPERTS)
    files = exported(trained, adapter, tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(copy.deepcopy(trained.plain), str(files)).eval()
    expected, _ = trained.pass_([adapter], parts[:1])
    close(logprobs_of(loaded, parts[0]).detach(), expected)


@pytest.mark.parametrize("trained", WITH_EXPERTS, indirect=True)
def test_an_export_of_routed_experts_is_merged_to_the_same_by_tinkers_cookbook(
    trained: Trained, parts: list[Tensor], tmp_path: Path
) -> None:
    from tinker_cookbook.exceptions import WeightsMergeError
    from tinker_cookbook.weights import build_hf_model
    from transformers import AutoModelForCausalLM

    adapter = trained.adapter("a")
    base, files = tmp_path / "base", exported(trained, adapter, tmp_path / "adapter")
    trained.plain.save_pretrained(base)
    merged = {"base_model": str(base), "adapter_path": str(files), "output_path": str(tmp_path / "merged")}
    if trained.plain.config.model_type == "mixtral":
        # It has other names in files than any model that Tinker serves.
        with pytest.raises(WeightsMergeError):
            build_hf_model(**merged)
        return
    build_hf_model(**merged)
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged", dtype=torch.float32, attn_implementation="eager"
    )
    expected, _ = trained.pass_([adapter], parts[:1])
    close(logprobs_of(loaded, parts[0]).detach(), expected)


def test_the_page_says_what_was_found() -> None:
    head = "| family | class | `train_attn` | `train_mlp` | one sequence over several ranks |"
    lines = [head, "|---|---|---|---|---|"]
    for family, model_type in FAMILIES.items():
        found = Trained.of(model_type)
        targets, refused = found.targets(found.spec()), found.flags()
        cells = [
            "refused" if refused[flag] else ", ".join(f"`{leaf}`" for leaf in leaves(targets, flag))
            for flag in FLAGS[:2]
        ]
        cells.append(shared_by_ranks(found))
        lines.append(f"| {family} | `{type(found.model).__name__}` | {' | '.join(cells)} |")
    table = "\n".join(lines) + "\n"
    written = PAGE.read_text(encoding="utf-8")
    before, _, rest = written.partition(BEGIN)
    page = f"{before}{BEGIN}{table}{END}{rest.partition(END)[2]}"
    if os.environ.get(WRITE):
        PAGE.write_text(page, encoding="utf-8")
    else:
        assert page == written, "run: make models"


def shared_by_ranks(found: Trained) -> str:
    asked = found.asked()
    if splits(asked, 2):
        return "yes"
    sinks = any(name.endswith(".sinks") for name, _ in found.model.named_parameters())
    with_kernel = [replace(layer, kernel=layer.plain or sinks, sinks=sinks) for layer in asked]
    return "with FlashAttention" if splits(with_kernel, 2) else "no"


def leaves(targets: Mapping[str, Any], flag: str) -> list[str]:
    """Names of what a flag adapts, as the library calls them."""
    found = [name.rpartition(".")[2] for name in targets if kind_of(name) == flag]
    return list(dict.fromkeys(found))
