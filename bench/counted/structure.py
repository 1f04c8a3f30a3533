"""What the trainer costs by its structure: rows that are the same on any machine, in seconds."""

from __future__ import annotations

import numpy as np

from bench.counted import balance, counts
from bench.rows import Row

RANKS, MICRO_BATCH = 8, 8192
ADAPTERS = 64
DEALT = {
    "8 tenants x 1000": [[1000]] * 8,
    "8 tenants x 10 x 100": [[100] * 10] * 8,
    "1 tenant x 64 x 128": [[128] * 64],
    "1 tenant x 32 x 1024": [[1024] * 32],
    "3 tenants x 512 x 128": [[128] * 512] * 3,
}
MANY = {
    "1 tenant x 96 x 1024": [[1024] * 96],
    "2 tenants x 96 x 1024": [[1024] * 96] * 2,
    "8 tenants x 96 x 1024": [[1024] * 96] * 8,
    "5 tenants x 100 x 1024": [[1024] * 100] * 5,
    "3 tenants x 64 x 700": [[700] * 64] * 3,
    "4 tenants x 16 x 5000": [[5000] * 16] * 4,
    "8 tenants x 256, log-normal": [
        np.clip(np.exp(np.random.default_rng(seed).normal(6.5, 0.8, 256)), 32, 8192).astype(int).tolist()
        for seed in range(8)
    ],
}
"""What takes several passes, and does not come out even."""


def measure() -> list[Row]:
    """Kernels by adapters, bytes kept per token, balance over ranks, and padding."""
    return [_kernels(), _kept(), _balance(), _busy(), _padding()]


def _kernels() -> Row:
    asked = {"tokens": MICRO_BATCH, "vocabulary": counts.QWEN3_8B["vocab_size"]}
    none, one, many = (counts.kernel_calls([32] * count, **asked) for count in (0, 1, ADAPTERS))
    return Row(
        f"kernel calls of a pass: {ADAPTERS} adapters / 1 adapter",
        many.total() / one.total(),
        "x",
        at_most=1.3,
        required=True,
        details={
            "calls_of_0": none.total(),
            "calls_of_1": one.total(),
            f"calls_of_{ADAPTERS}": many.total(),
            "of_them_grouped_products": many["_grouped_mm"],
            "layers": counts.LAYERS,
            **asked,
        },
    )


def _kept() -> Row:
    kept = counts.kept_per_token(checkpointing=True) / 1e6
    plain = counts.kept_per_token(checkpointing=False) / 1e6
    return Row(
        "memory kept for the backward pass: Qwen3-8B, rank 32, checkpointed blocks",
        kept,
        "MB a token",
        at_most=0.5,
        required=True,
        details={"without_checkpointing_mb": round(plain, 2)},
    )


def _balance() -> Row:
    found = {
        name: balance.loads(balance.passes(tenants, RANKS, MICRO_BATCH)) for name, tenants in DEALT.items()
    }
    ratios = {name: max(tokens) / min(tokens) for name, tokens in found.items()}
    return Row(
        f"tokens of {RANKS} ranks: the busiest / the idlest, of the worst case",
        max(ratios.values()),
        "x",
        at_most=1.1,
        required=True,
        details={name: round(ratio, 3) for name, ratio in ratios.items()},
    )


def _busy() -> Row:
    found = {
        name: balance.busy(balance.passes(tenants, RANKS, MICRO_BATCH)) for name, tenants in MANY.items()
    }
    return Row(
        f"share of the time of passes in which {RANKS} ranks compute, of the worst case",
        min(found.values()),
        "x",
        at_least=0.85,
        required=True,
        details={name: round(share, 3) for name, share in found.items()},
    )


def _padding() -> Row:
    rng = np.random.default_rng(5)
    lengths = np.clip(np.exp(rng.normal(np.log(180), 0.8, 64)), 32, 1024).astype(int).tolist()
    return Row(
        "padding: tokens computed that nobody sent, lengths log-normal from 32 to 1024",
        counts.padding(lengths),
        "tokens",
        at_most=0,
        required=True,
        details={"sequences": len(lengths), "tokens": sum(lengths), "if_padded": len(lengths) * max(lengths)},
    )
