"""What layers are given for adapters on a CPU, beside one product for each row."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from vllm.lora.layers import LoRAMapping
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from services.sampler.worker.cpu import adapters

pytestmark = pytest.mark.heavy

SLOTS: list[int | None] = [11, 22, None, 33]
"""The adapter in each."""
RANK, WIDTH = 3, 5
SLICES = (6, 2)
SCALE = 0.5
OF_ROWS = {
    "nobody": [0, 0, 0],
    "one": [22, 22, 22],
    "the last slot and nobody": [0, 33, 0, 0, 33],
    "in the order of slots": [11, 11, 22, 33],
    "in another order": [33, 33, 11, 22, 22],
    "in turn": [11, 22, 33, 11, 22, 33, 11, 22, 33],
    "in turn with nobody": [22, 0, 11, 0, 22, 33, 0, 11],
}


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


A = tuple(random(len(SLOTS), 1, RANK, WIDTH) + number for number in range(len(SLICES)))
B = tuple(random(len(SLOTS), 1, width, RANK) for width in SLICES)


def wrapper(ids: list[int], sampled: list[int], corrected: bool = True) -> PunicaWrapperCPU:
    """vLLM's after the step of some rows."""
    made = PunicaWrapperCPU(64, 64, torch.device("cpu"))
    if corrected:
        adapters.correct(SimpleNamespace(punica_wrapper_mapping={"model": made}))
    # Of a step before, of which nothing may be left.
    for rows, heads in (([22] * 7, [22] * 7), (ids, sampled)):
        made.update_metadata(LoRAMapping(tuple(rows), tuple(heads)), SLOTS, len(SLOTS), 100)
    return made


def expected(y: Tensor, x: Tensor, ids: list[int], a: Tensor, b: Tensor, scale: float) -> Tensor:
    """One product for each row."""
    out = y.clone()
    for row, adapter in enumerate(ids):
        if adapter:
            slot = SLOTS.index(adapter)
            out[row] += scale * (b[slot, 0] @ (a[slot, 0] @ x[row]))
    return out


@pytest.mark.parametrize("ids", OF_ROWS.values(), ids=OF_ROWS)
def test_every_row_of_a_layer_has_the_adapter_of_its_own_request(ids: list[int]) -> None:
    x, y = random(len(ids), WIDTH), random(len(ids), sum(SLICES))
    parts = zip(y.split(SLICES, 1), A, B, strict=True)
    wanted = torch.cat([expected(part, x, ids, a, b, SCALE) for part, a, b in parts], 1)
    wrapper(ids, [33]).add_lora_linear(y, x, A, B, SCALE, SLICES)
    torch.testing.assert_close(y, wanted)


@pytest.mark.parametrize("padding", [2, 0, -1], ids=["wider", "as wide", "narrower"])
@pytest.mark.parametrize("ids", OF_ROWS.values(), ids=OF_ROWS)
def test_every_sampled_row_has_the_head_of_its_own_request(ids: list[int], padding: int) -> None:
    head = SLICES[0]
    common = head + min(padding, 0)
    x, y = random(len(ids), WIDTH), random(len(ids), head + padding)
    of_head = expected(y[:, :common], x, ids, A[0], B[0][:, :, :common], SCALE)
    wanted = torch.cat([of_head, y[:, common:]], 1)
    wrapper([33], ids).add_lora_logits(y, x, A[0], B[0], SCALE)
    torch.testing.assert_close(y, wanted)


def test_in_bfloat16_products_with_a_are_float32_and_those_with_b_are_not() -> None:
    ids = OF_ROWS["in turn"]
    x, y = random(len(ids), WIDTH).bfloat16(), torch.zeros(len(ids), SLICES[0], dtype=torch.bfloat16)
    a, b = A[0].bfloat16(), B[0].bfloat16()
    slots = [SLOTS.index(each) for each in ids]
    low = torch.stack([a[slot, 0].float() @ row.float() for slot, row in zip(slots, x, strict=True)])
    wanted = torch.stack([b[slot, 0] @ row for slot, row in zip(slots, low.bfloat16(), strict=True)])
    wrapper(ids, [33]).add_lora_linear(y, x, (a,), (b,), 1.0, SLICES[:1])
    torch.testing.assert_close(y, wanted)


def test_without_the_correction_a_row_without_an_adapter_has_that_of_the_last_slot() -> None:
    ids = OF_ROWS["the last slot and nobody"]
    x = random(len(ids), WIDTH)
    found = {}
    for corrected in (True, False):
        found[corrected] = torch.zeros(len(ids), SLICES[0])
        wrapper(ids, [33], corrected).add_lora_linear(found[corrected], x, A[:1], B[:1], 1.0, SLICES[:1])
    assert (found[True][0] == 0).all()
    torch.testing.assert_close(found[False][0], B[0][-1, 0] @ (A[0][-1, 0] @ x[0]))


def test_a_vllm_with_other_adapters_on_a_cpu_is_told() -> None:
    with pytest.raises(
        RuntimeError, match=r"SimpleNamespace.s; check services\.sampler\.worker\.cpu\.adapters"
    ):
        adapters.correct(SimpleNamespace(punica_wrapper_mapping={"model": SimpleNamespace()}))
