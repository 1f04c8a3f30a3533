"""Curves: as characters for the terminal, as a PNG for everything else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

_EIGHTHS = " ▁▂▃▄▅▆▇█"


def bars(values: Sequence[float], height: int = 6, width: int = 3) -> str:
    """A bar chart of non-negative finite values: `height` lines of text with a scale at the left.

    Raises ValueError for no values, and for one that is negative or not finite.
    """
    if not values or not all(math.isfinite(value) and value >= 0 for value in values):
        raise ValueError(f"bars need finite values that are not negative, got {list(values)}")
    top = max(values) or 1.0
    eighths = [round(value / top * height * 8) for value in values]
    lines = []
    for row in reversed(range(height)):
        label = f"{top * (row + 1) / height:6.2f}" if row == height - 1 or row == height // 2 else " " * 6
        cells = (_EIGHTHS[min(8, max(0, filled - 8 * row))] * (width - 1) for filled in eighths)
        lines.append(f"{label} ┤" + " ".join(cells))
    lines.append(f"{0:6.2f} └" + "─" * (len(values) * width - 1))
    return "\n".join(lines)


def save_png(path: Path, losses: Sequence[float], rewards: Sequence[float], model: str) -> None:
    """Draws the loss of the supervised run and the reward of the reinforced one, side by side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    figure.suptitle(model)
    left.plot(range(1, len(losses) + 1), losses, marker="o", color="tab:blue")
    left.set(
        title="Supervised fine-tuning", xlabel="step", ylabel="loss per answer token (nats)", ylim=(0, None)
    )
    right.plot(range(1, len(rewards) + 1), rewards, marker="o", color="tab:green")
    right.set(title="Reinforcement learning", xlabel="step", ylabel="mean reward", ylim=(0, 1.05))
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
