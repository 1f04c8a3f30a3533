"""Parts of the engine on a device beside plain PyTorch. On a CPU the same code takes the CPU's own paths."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3RMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from services.trainer.compute.attention import Sequences, _has_kernel, attend
from services.trainer.compute.data import LoraSpec
from services.trainer.compute.kernels.norms import fuse_norms
from services.trainer.compute.kernels.rotations import fuse_rotations
from services.trainer.compute.lora.adapter import Adapter, LinearShape
from services.trainer.compute.lora.experts import shapes_of
from services.trainer.compute.lora.grouped import LoraRouter
from services.trainer.compute.lora.parts import Part
from services.trainer.compute.lora.products import is_grouped
from services.trainer.compute.lora.stack import Segment
from services.trainer.compute.memory.buffers import FlatBuffers
from services.trainer.compute.optimizer import AdapterOptimizer, Due, step_together
from services.trainer.compute.prefix.flash import FlashAttention
from services.trainer.compute.prefix.trial import works
from tests.component.engine.data import NO_CLIP
from tests.unit.trainer.compute.plain import PlainExperts


def attention(device: str, window: int | None) -> None:
    """A flat batch in bfloat16 beside the CPU's form in float32, forward and backward."""
    lengths = [64, 64, 7, 1, 130]
    generator = torch.Generator().manual_seed(3)
    module: Any = nn.Module()
    module.num_key_value_groups, module.is_causal = 2, True
    given = [torch.randn(1, heads, sum(lengths), 64, generator=generator) for heads in (4, 2, 2)]
    above = torch.randn(1, sum(lengths), 4, 64, generator=generator)

    def computed(where: str, dtype: torch.dtype) -> list[Tensor]:
        query, key, value = (tensor.to(where, dtype).requires_grad_() for tensor in given)
        assert _has_kernel(query, value) == (where == "cuda" and dtype == torch.bfloat16)
        output, _ = attend(module, query, key, value, window, sequences=Sequences.of(lengths, where))
        gradients = torch.autograd.grad(output, (query, key, value), above.to(where, dtype))
        return [tensor.detach().float().cpu() for tensor in (output, *gradients)]

    for found, expected in zip(computed(device, torch.bfloat16), computed("cpu", torch.float32), strict=True):
        assert _error(found, expected) < 2e-2


def trees(device: str, directory: Path) -> None:
    """FlashAttention, called for the pieces of a tree, comes to attention over it, through windows too. A CPU
    has none."""
    del directory
    assert works(device, FlashAttention()) == (device == "cuda")
    assert works(device, FlashAttention(), windows=True) == (device == "cuda")


def grouped(device: str, count: int, rank: int) -> None:
    """Adapters in bfloat16 as grouped products beside a loop over them in float32; one has no token."""
    features, made = 64, 96
    generator = torch.Generator().manual_seed(count)
    targets = {"linear": LinearShape(features, made)}
    adapters = [
        Adapter(LoraSpec(rank), targets, str(number), device, features, torch.bfloat16)
        for number in range(count)
    ]
    for adapter in adapters:
        adapter.flat.copy_(torch.randn(adapter.flat.shape, generator=generator) * 0.1)
        adapter.begin_renewal()
    sizes = [0 if number == 1 else 3 + number % 5 for number in range(count)]
    linear = nn.Linear(features, made, bias=False).requires_grad_(False).to(device, torch.bfloat16)
    router = LoraRouter()
    router.hook(linear, "linear")
    x = torch.randn(sum(sizes), features, generator=generator).to(device, torch.bfloat16).requires_grad_()
    above = torch.randn(sum(sizes), made, generator=generator).to(device, torch.bfloat16)

    # Of fresh ones nothing counts that was there.
    sums = [torch.full_like(adapter.flat, torch.nan) for adapter in adapters]
    placed = zip(sizes, adapters, sums, strict=True)
    with router.route([Segment(tokens, adapter, total, True) for tokens, adapter, total in placed]):
        stack = router._stack
        assert stack is not None
        a, b = stack.matrices("linear.lora_A"), stack.matrices("linear.lora_B")
        assert count == 1 or is_grouped(x, a.transpose(1, 2), b.transpose(1, 2)), "whatever their rank"
        y = linear(x)
        y.backward(above)

    alone = x.detach().float().requires_grad_()
    masters = [adapter.low.float().requires_grad_() for adapter in adapters]
    outputs = []
    for part, master, adapter in zip(alone.split(sizes), masters, adapters, strict=True):
        views = adapter.views(master)
        a, b = views["linear.lora_A"], views["linear.lora_B"]
        outputs.append(part @ linear.weight.float().T + part @ a.T @ b.T * adapter.scale)
    expected = torch.cat(outputs)
    expected.backward(above.float())
    assert x.grad is not None and alone.grad is not None
    assert _error(y.detach().float(), expected.detach()) < 2e-2
    assert _error(x.grad.float(), alone.grad) < 2e-2
    for total, master, tokens in zip(sums, masters, sizes, strict=True):
        assert master.grad is not None
        assert _error(total, master.grad) < 2e-2 if tokens else not total.any()


def experts(device: str, count: int) -> None:
    """Adapters of routed experts in bfloat16 beside one token and one expert after the other in float32."""
    hidden, inner, number, choices = 64, 32, 64, 4
    config = AutoConfig.for_model(
        "qwen3_moe", hidden_size=hidden, moe_intermediate_size=inner, num_experts=number
    )
    config._experts_implementation = "eager"
    generator = torch.Generator().manual_seed(count)

    def random(*shape: int, scale: float = 0.2) -> Tensor:
        return torch.randn(*shape, generator=generator) * scale

    module: Any = Qwen3MoeExperts(config).requires_grad_(False)
    for weight in module.parameters():
        weight.copy_(random(*weight.shape).bfloat16())
    targets = {f"experts.{part}": shape for part, shape in shapes_of(module).items()}
    adapters = [
        Adapter(LoraSpec(16), targets, str(each), device, hidden, torch.bfloat16) for each in range(count)
    ]
    for adapter in adapters:
        adapter.load(random(adapter.low.numel()).bfloat16().float())
    sizes = [0 if each == 1 else 2 + each % 3 for each in range(count)]
    tokens = sum(sizes)
    x, above = random(tokens, hidden, scale=1.0).bfloat16(), random(tokens, hidden, scale=1.0).bfloat16()
    weights, chosen = torch.rand(tokens, number, generator=generator).topk(choices)

    router, on_device = LoraRouter(), copy.deepcopy(module).to(device, torch.bfloat16)
    router.hook_experts(on_device, "experts")
    given = x.to(device).requires_grad_()
    first: list[Tensor] = []
    for again in (False, True):
        given.grad = None
        sums = [torch.full_like(adapter.low, torch.nan, dtype=torch.float32) for adapter in adapters]
        with router.route([Segment(*each, True) for each in zip(sizes, adapters, sums, strict=True)]):
            y = on_device(given, chosen.to(device), weights.to(device))
            y.backward(above.to(device))
        assert given.grad is not None
        found = [y.detach(), given.grad, *sums]
        # A replay comes to the same bits.
        assert not again or all(map(torch.equal, first, found))
        first = found

    outputs, alone = [], x.detach().float().requires_grad_()
    masters = [adapter.low.float().cpu().requires_grad_() for adapter in adapters]
    parts = (each.split(sizes) for each in (alone, chosen, weights))
    for adapter, master, *part in zip(adapters, masters, *parts, strict=True):
        views = {name.removeprefix("experts."): view for name, view in adapter.views(master).items()}
        plain = PlainExperts(module, views, adapter.scale)
        plain.matrices = views
        if part[0].numel():
            outputs.append(plain(*part))
    expected = torch.cat(outputs)
    expected.backward(above.float())
    assert given.grad is not None and alone.grad is not None
    assert _error(y.detach().float().cpu(), expected.detach()) < 3e-2
    assert _error(given.grad.float().cpu(), alone.grad) < 3e-2
    for total, master, has in zip(sums, masters, sizes, strict=True):
        assert _error(total.cpu(), master.grad) < 3e-2 if has else not total.any()


def norms(device: str, directory: Path) -> None:
    """Fused norms and their gradient are in bfloat16 as near to the model's own in float32 as its own are."""
    del directory
    generator = torch.Generator().manual_seed(5)
    exact, plain, fused = (Qwen3RMSNorm(256, eps=1e-6) for _ in range(3))
    for norm in (exact, plain, fused):
        norm.requires_grad_(False).weight.copy_(1 + torch.linspace(-0.3, 0.3, 256))
    plain.to(device, torch.bfloat16)
    fuse_norms(fused.to(device, torch.bfloat16))
    x, above = (torch.randn(300, 256, generator=generator).bfloat16() for _ in range(2))

    def computed(norm: nn.Module, given: Tensor, slope: Tensor) -> list[Tensor]:
        given = given.detach().requires_grad_()
        made = norm(given)
        made.backward(slope)
        assert given.grad is not None
        return [made.detach().float().cpu(), given.grad.float().cpu()]

    expected = computed(exact, x.float(), above.float())
    pairs = [computed(norm, x.to(device), above.to(device)) for norm in (plain, fused)]
    for own, found, wanted in zip(*pairs, expected, strict=True):
        assert _error(found, wanted) <= 1.1 * _error(own, wanted)


def rotations(device: str, directory: Path) -> None:
    """Attention whose rotation has fewer kernels is, with its gradient, in bfloat16 as near to the model's
    own in float32 as that is itself; and nothing happened to any other attention."""
    del directory
    generator = torch.Generator().manual_seed(6)
    config = AutoConfig.for_model(
        "qwen3", hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64
    )
    config._attn_implementation = "eager"
    exact, plain, fused = (Qwen3Attention(config, 0).requires_grad_(False) for _ in range(3))
    for attention in (plain, fused):
        attention.load_state_dict(exact.state_dict())
        attention.to(device, torch.bfloat16)
    fuse_rotations(fused)
    assert fused.forward.__func__ is not Qwen3Attention.forward is plain.forward.__func__
    x, above = (torch.randn(1, 90, 256, generator=generator).bfloat16() for _ in range(2))
    angles = torch.rand(1, 90, 32, generator=generator).repeat(1, 1, 2) * 6

    def computed(attention: Any, dtype: torch.dtype, where: str) -> list[Tensor]:
        given = x.to(where, dtype, copy=True).requires_grad_()
        turns = (angles.cos().to(where, dtype), angles.sin().to(where, dtype))
        made, _ = attention(given, position_embeddings=turns, attention_mask=None)
        made.backward(above.to(where, dtype))
        assert given.grad is not None
        return [made.detach().float().cpu(), given.grad.float().cpu()]

    expected = computed(exact, torch.float32, "cpu")
    pairs = [computed(each, torch.bfloat16, device) for each in (plain, fused)]
    for own, found, wanted in zip(*pairs, expected, strict=True):
        assert _error(found, wanted) <= 1.1 * _error(own, wanted)


def parts(device: str, directory: Path) -> None:
    """What ranks step of an adapter, one part after another, is bit for bit what one rank steps of all."""
    del directory
    generator = torch.Generator().manual_seed(7)
    buffers = FlatBuffers()
    for size, ranks in ((100_003, 2), (70_001, 3), (40, 3)):
        masters = torch.randn(size, generator=generator).to(device)
        shares = [Part(size, ranks, rank) for rank in range(ranks)]
        whole = AdapterOptimizer(masters.clone())
        split = [AdapterOptimizer(part.of(masters), part.elements) for part in shares]
        for _ in range(3):
            gradient = torch.randn(size, generator=generator).to(device)
            step_together([Due(whole, gradient.clone(), NO_CLIP)], buffers)
            for optimizer, part in zip(split, shares, strict=True):
                step_together([Due(optimizer, part.of(gradient).clone(), NO_CLIP)], buffers)
        assert torch.equal(masters, whole.flat)
        for name, moment in whole.moments.items():
            assert torch.equal(torch.cat([each.moments[name] for each in split])[:size], moment)


def _error(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference, of that of what is expected."""
    return float((found - expected).norm() / expected.norm())
