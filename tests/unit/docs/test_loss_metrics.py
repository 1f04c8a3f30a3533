"""docs/losses.md names every metric that a loss reports, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from services.trainer.compute.losses import combine_metrics
from tests.unit.trainer.compute.losses.policy_batches import POLICY_LOSSES, compute, episode, settings_of

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "losses.md"


def documented() -> set[str]:
    """Of a row such as "`value:mean`, `return:mean` (and `:sum`)" all four."""
    table = DOCUMENT.read_text().partition("\n## Metrics\n")[2].partition("\n## ")[0]
    found = set()
    for cell in re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE):
        bases = []
        for base, reduction in re.findall(r"`(\w*):(\w+)`", cell):
            bases += [base] if base else []
            found |= {f"{name}:{reduction}" for name in ([base] if base else bases)}
    return found


def reported(name: str, outputs: torch.Tensor, inputs: dict[str, torch.Tensor]) -> set[str]:
    _, parts = compute(name, outputs, inputs, settings_of(name))
    return set(combine_metrics(name, [{"loss:sum": 0.0} | {part: float(v) for part, v in parts.items()}]))


def test_every_metric_is_in_the_document_and_those_alone() -> None:
    critic = {"values": torch.zeros(2), "returns": torch.tensor([0.0, 1.0]), "weights": torch.ones(2)}
    seen = reported("ppo_critic", torch.zeros(2), critic)
    for name in POLICY_LOSSES:
        seen |= reported(name, *episode(name))
    assert documented() == seen
