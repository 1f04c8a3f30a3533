"""Adapters of several tenants in one micro-batch: values, gradients, isolation."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from services.trainer.compute.data import LoraSpec
from services.trainer.compute.lora.adapter import Adapter, LinearShape
from services.trainer.compute.lora.grouped import LoraRouter
from services.trainer.compute.lora.stack import Segment

Q, V = "layer.q_proj", "layer.v_proj"
SHAPES = {Q: LinearShape(8, 12), V: LinearShape(8, 16)}


def adapter(seed: int, rank: int, *names: str, critic: bool = False) -> Adapter:
    """One whose matrices are all random."""
    spec = LoraSpec(rank, role="critic" if critic else "policy")
    made = Adapter(spec, {name: SHAPES[name] for name in names}, "m", "cpu", hidden_size=8)
    made.flat.normal_(generator=torch.Generator().manual_seed(seed))
    return made


def hooked(name: str, in_features: int = 8) -> tuple[nn.Linear, LoraRouter]:
    shape = SHAPES[name]
    linear = nn.Linear(in_features, shape.out_features).requires_grad_(False)
    router = LoraRouter()
    router.hook(linear, name)
    return linear, router


def by_hand(linear: nn.Linear, x: torch.Tensor, each: Adapter, flat: torch.Tensor, name: str) -> torch.Tensor:
    views = each.views(flat)
    if f"{name}.lora_A" not in views:
        return linear(x)
    delta = x @ views[f"{name}.lora_A"].T @ views[f"{name}.lora_B"].T
    return nn.functional.linear(x, linear.weight, linear.bias) + delta * 32 / each.spec.rank


COMPANIES = {
    "alone": [adapter(1, 3, Q, V)],
    "of one shape": [adapter(1, 8, Q, V), adapter(2, 8, Q, V), adapter(3, 8, Q, V)],
    "of one shape that no kernel takes": [adapter(1, 3, Q, V), adapter(2, 3, Q, V)],
    "of many shapes": [
        adapter(1, 2, Q),
        adapter(2, 16, Q, V),
        adapter(3, 5, V),
        adapter(4, 3, Q, critic=True),
    ],
}


@pytest.mark.parametrize("name", [Q, V])
@pytest.mark.parametrize("company", COMPANIES)
@pytest.mark.parametrize("tokens", [(5, 1, 9, 4), (5, 5, 5, 5)], ids=["of any length", "of one length"])
@pytest.mark.parametrize("fresh", ["none", "all", "the first"])
def test_each_segment_has_its_own_adapter_and_gradient(
    company: str, name: str, tokens: tuple[int, ...], fresh: str
) -> None:
    linear, router = hooked(name)
    adapters = COMPANIES[company]
    sizes = tokens[: len(adapters)]
    x = torch.randn(1, sum(sizes), 8, generator=torch.Generator().manual_seed(9), requires_grad=True)
    weights = torch.randn(sum(sizes), SHAPES[name].out_features, generator=torch.Generator().manual_seed(8))
    is_fresh = [fresh == "all" or (fresh == "the first" and not number) for number, _ in enumerate(adapters)]
    # Of a fresh one nothing counts that was there, and all is written.
    before = [torch.nan if empty else 1.0 for empty in is_fresh]
    gradients = [torch.full_like(each.flat, value) for each, value in zip(adapters, before, strict=True)]
    with router.route([Segment(*each) for each in zip(sizes, adapters, gradients, is_fresh, strict=True)]):
        y = linear(x)
        (y[0] * weights).sum().backward()

    alone = x.detach()[0].requires_grad_()
    masters = [each.flat.clone().requires_grad_() for each in adapters]
    parts = zip(alone.split(sizes), adapters, masters, strict=True)
    expected = torch.cat([by_hand(linear, part, each, flat, name) for part, each, flat in parts])
    (expected * weights).sum().backward()
    torch.testing.assert_close(y[0], expected, rtol=1e-5, atol=1e-4)
    assert x.grad is not None and alone.grad is not None
    torch.testing.assert_close(x.grad[0], alone.grad, rtol=1e-4, atol=1e-3)
    for gradient, master, empty in zip(gradients, masters, is_fresh, strict=True):
        added = torch.zeros_like(master) if master.grad is None else master.grad
        torch.testing.assert_close(gradient, added if empty else added + 1, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("bias", [False, True])
def test_a_linears_output_is_added_to_in_place_where_that_is_no_view(bias: bool) -> None:
    """Through a view that is changed autograd goes by several copies of it."""
    linear = nn.Linear(8, 12, bias=bias).requires_grad_(False)
    router = LoraRouter()
    router.hook(linear, Q)
    one = adapter(1, 8, Q)
    x = torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(3), requires_grad=True)
    gradient = torch.zeros_like(one.flat)
    made: list[torch.Tensor] = []
    with router.route([Segment(5, one, gradient, True)]):
        # Before the router's hook has added to it.
        linear.register_forward_hook(lambda module, args, output: made.append(output), prepend=True)
        y = linear(x * 1)
        kinds = [type(function).__name__ for function, _ in y.grad_fn.next_functions if function]
        y.square().sum().backward()
    assert (y.data_ptr() == made[0].data_ptr()) == (not bias)
    assert kinds[0] == ("CloneBackward0" if bias else "UnsafeViewBackward0")
    alone, master = x.detach()[0].requires_grad_(), one.flat.clone().requires_grad_()
    expected = by_hand(linear, alone, one, master, Q)
    expected.square().sum().backward()
    assert x.grad is not None and alone.grad is not None and master.grad is not None
    torch.testing.assert_close(x.grad[0], alone.grad, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(gradient, master.grad, rtol=1e-4, atol=1e-3)


def test_a_loss_of_one_segment_gives_the_others_no_gradient() -> None:
    linear, router = hooked(Q)
    adapters = [adapter(1, 2, Q), adapter(2, 5, Q)]
    gradients = [torch.zeros_like(each.flat) for each in adapters]
    with router.route([Segment(3, adapters[0], gradients[0]), Segment(6, adapters[1], gradients[1])]):
        linear(torch.randn(1, 9, 8))[:, :3].square().sum().backward()
    assert gradients[0].any()
    assert not gradients[1].any()


def test_two_operations_of_one_model_have_a_gradient_each() -> None:
    linear, router = hooked(Q)
    each = adapter(1, 8, Q)
    x = torch.randn(1, 6, 8)
    apart = [torch.zeros_like(each.flat) for _ in range(2)]
    with router.route([Segment(2, each, apart[0]), Segment(4, each, apart[1])]):
        linear(x).sum().backward()
    together = torch.zeros_like(each.flat)
    with router.route([Segment(6, each, together)]):
        linear(x).sum().backward()
    assert apart[0].any() and apart[1].any()
    torch.testing.assert_close(apart[0] + apart[1], together)


def test_gradients_of_several_batches_add_up() -> None:
    linear, router = hooked(Q)
    one, other = adapter(1, 8, Q), adapter(2, 8, Q)
    x = torch.randn(1, 6, 8)
    sums = [torch.zeros_like(one.flat) for _ in range(2)]
    for gradient, repeats in zip(sums, (1, 2), strict=True):
        for _ in range(repeats):
            with router.route([Segment(2, one, gradient), Segment(4, other, torch.zeros_like(other.flat))]):
                linear(x).sum().backward()
    assert sums[0].any()
    torch.testing.assert_close(sums[1], 2 * sums[0])
    assert one.flat.grad is None


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("sizes", [(6,), (2, 4)])
def test_a_backward_pass_that_fails_leaves_nothing_behind(sizes: tuple[int, ...], fresh: bool) -> None:
    linear, router = hooked(Q)
    adapters = [adapter(seed, 8, Q) for seed, _ in enumerate(sizes)]
    gradients, expected = ([torch.full_like(each.flat, 2.0) for each in adapters] for _ in range(2))
    x = torch.randn(1, 6, 8)

    def backward(sums: list[torch.Tensor], *, fails: bool) -> None:
        with router.route([Segment(*each, fresh) for each in zip(sizes, adapters, sums, strict=True)]):
            linear(x).square().sum().backward()
            if fails:
                raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        backward(gradients, fails=True)
    assert fresh or all((gradient == 2).all() for gradient in gradients)
    for sums in (gradients, expected):
        backward(sums, fails=False)
    for gradient, other in zip(gradients, expected, strict=True):
        assert torch.equal(gradient, other)


def test_a_matrix_that_the_backward_pass_did_not_reach_has_no_gradient() -> None:
    """One that computed for no loss, as a head does where nothing is scored."""
    linear, router = hooked(Q)
    one, other = adapter(1, 8, Q, V), adapter(2, 8, Q, V)
    gradients = [torch.full_like(each.flat, torch.nan) for each in (one, other)]
    for segments in ([(6, one, gradients[0])], [(2, one, gradients[0]), (4, other, gradients[1])]):
        with router.route([Segment(*each, True) for each in segments]):
            linear(torch.randn(1, 6, 8)).sum().backward()
        for _, each, gradient in segments:
            views = each.views(gradient)
            assert views[f"{Q}.lora_A"].any() and views[f"{Q}.lora_B"].any()
            assert not views[f"{V}.lora_A"].any() and not views[f"{V}.lora_B"].any()


def test_what_is_added_to_a_gradient_twice_in_a_pass_adds_up() -> None:
    """As the head's is, which computes piece by piece."""
    linear, router = hooked(Q)
    adapters = [adapter(1, 8, Q), adapter(2, 8, Q)]
    x = torch.randn(1, 6, 8)
    once, twice = ([torch.full_like(each.flat, torch.nan) for each in adapters] for _ in range(2))
    for sums, times in ((once, 1), (twice, 2)):
        with router.route([Segment(3, each, into, True) for each, into in zip(adapters, sums, strict=True)]):
            sum(linear(x).sum() for _ in range(times)).backward()  # type: ignore[union-attr]
    for gradient, double in zip(once, twice, strict=True):
        torch.testing.assert_close(double, 2 * gradient)


def test_without_gradients_no_graph_is_built() -> None:
    linear, router = hooked(Q)
    with router.route([Segment(2, adapter(1, 2, Q)), Segment(1, adapter(2, 4, Q))]):
        assert not linear(torch.randn(1, 3, 8)).requires_grad


def test_nothing_is_routed_after_the_context() -> None:
    linear, router = hooked(Q)
    x = torch.randn(1, 2, 8)
    plain = linear(x)
    with router.route([Segment(2, adapter(1, 4, Q))]):
        assert not torch.equal(linear(x), plain)
    assert torch.equal(linear(x), plain)


def test_a_linear_that_sees_other_tokens_than_the_batchs_is_an_error() -> None:
    linear, router = hooked(Q)
    with router.route([Segment(2, adapter(1, 4, Q))]), pytest.raises(RuntimeError, match="3 tokens"):
        linear(torch.randn(1, 3, 8))


def test_a_low_precision_copy_is_what_passes_use_and_follows_the_masters() -> None:
    each = Adapter(LoraSpec(8), {Q: SHAPES[Q]}, "m", "cpu", 8, torch.bfloat16)
    each.flat.normal_()
    each.begin_renewal()
    assert torch.equal(each.low, each.flat.bfloat16())
    linear, router = hooked(Q)
    linear.bfloat16()
    x, gradient = torch.randn(1, 3, 8).bfloat16(), torch.zeros_like(each.flat)
    with router.route([Segment(3, each, gradient)]):
        y = linear(x)
        y.float().sum().backward()
    expected = by_hand(linear.float(), x[0].float(), each, each.flat, Q)
    torch.testing.assert_close(y[0].float(), expected, rtol=0.05, atol=0.3)
    assert gradient.dtype == torch.float32 and gradient.any()


@pytest.mark.parametrize("fresh", [False, True])
def test_values_come_from_each_critics_own_head_beside_other_segments(fresh: bool) -> None:
    router = LoraRouter()
    adapters = [adapter(1, 8, Q), adapter(2, 8, Q, critic=True), adapter(3, 4, Q, critic=True)]
    gradients = [torch.full_like(each.flat, torch.nan if fresh else 0.0) for each in adapters]
    hidden = torch.randn(5, 8)
    with router.route([Segment(*each, fresh) for each in zip((4, 2, 3), adapters, gradients, strict=True)]):
        values = router.values(hidden)
        values[:2].sum().backward()
    expected = [
        hidden[rows] @ each.views(each.flat)["value_head.weight"][0]
        for each, rows in zip(adapters[1:], (slice(0, 2), slice(2, 5)), strict=True)
    ]
    torch.testing.assert_close(values, torch.cat(expected))
    head_gradient = adapters[1].views(gradients[1])["value_head.weight"]
    torch.testing.assert_close(head_gradient[0], hidden[:2].sum(0))
    assert not gradients[0].any() and not gradients[2].any()
