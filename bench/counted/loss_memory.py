"""How much memory the loss takes at its peak, forward and backward, against the textbook's log-softmax.

`python -m bench.counted.loss_memory naive|ours` prints the bytes by which the process grew; each is a
process of its own, because a process's highest memory never goes down.
"""

from __future__ import annotations

import resource
import subprocess
import sys

from bench.rows import Row

POSITIONS, VOCAB, HIDDEN = 2048, 151_936, 64
"""A Qwen3 vocabulary. The hidden size is small, for it costs time but hardly memory."""


def measure() -> list[Row]:
    """Peak bytes over those of one float32 copy of the logits."""
    ours, naive = (_in_a_process(which) for which in ("ours", "naive"))
    copy = 4 * POSITIONS * VOCAB
    return [
        Row(
            "loss: peak memory / one float32 copy of [tokens, vocabulary]",
            ours / copy,
            "x bytes",
            at_most=1.0,
            details={
                "ours_mib": ours >> 20,
                "naive_mib": naive >> 20,
                "one_copy_mib": copy >> 20,
                "ours_over_naive": round(ours / naive, 3),
                "tokens": POSITIONS,
                "vocabulary": VOCAB,
            },
        )
    ]


def _in_a_process(which: str) -> int:
    done = subprocess.run(
        [sys.executable, "-m", "bench.counted.loss_memory", which],
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
        check=True,
    )
    return int(done.stdout)


def _peak_bytes(which: str) -> int:
    import torch
    from torch import nn

    from services.trainer.compute.logprobs import LogprobHead, Targets
    from services.trainer.compute.lora.grouped import LoraRouter

    linear = nn.Linear(HIDDEN, VOCAB, bias=False).requires_grad_(False)
    hidden = torch.randn(POSITIONS, HIDDEN, requires_grad=True)
    targets = torch.randint(VOCAB, (POSITIONS, 1))
    head = LogprobHead(linear, LoraRouter())
    # What the libraries allocate once is no part of the loss.
    head(hidden[:8], Targets(targets[:8, 0], ((8, 1),))).sum().backward()
    before = _highest()
    losses = {
        "ours": lambda: head(hidden, Targets(targets[:, 0], ((POSITIONS, 1),))).sum(),
        "naive": lambda: linear(hidden).log_softmax(-1).gather(1, targets).sum(),
    }
    losses[which]().backward()
    return _highest() - before


def _highest() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    print(_peak_bytes(sys.argv[1]))
