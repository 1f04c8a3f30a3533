"""docs/cookbook.md: which recipes ran, and what moved.

Invariant: a row comes from a run whose assertions held. A run of some tests replaces its own rows and leaves
the others.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_HEAD = """\
# The cookbook's recipes on Tinsmith

Written by `make test-ecosystem`. Each row is a recipe of `tinker-cookbook` {cookbook} as it is in its wheel,
started with `python -m tinker_cookbook.recipes.` and the command below, against one cluster of `tinsmith up`,
without a hub. POLICY is a Qwen3 of two layers that has learned to guess, served as `{policy}`;
create_data and twenty_questions, whose prompts are long, have a second cluster with another such model,
served as `{teacher}` too, the name that create_data asks for. Data sets are small files under the hub's
names in the working directory. The clusters have `--stable-reinforce-as ppo`,
for the recipes that use stable_reinforce unless `loss_fn` says otherwise. The tests in `tests/ecosystem`
assert what each row says.

| Recipe | Command | Steps | What moved | Seconds | On |
|---|---|---:|---|---:|---|
"""

_TAIL = """
## A long run

"rl_loop, long" of the table: the mean reward of each step's 64 answers. Right is the digit that all its
problems have as their answer, which nothing but the reward tells.

![The mean reward by step](cookbook.svg)

## Not in the table

| Recipe | Why |
|---|---|
| math_rl on other problems, preference.rlhf, true_thinking_score | calls of rows above, other data |
| distillation.on_policy_multi_teacher | as on_policy_distillation, with two teachers |
| code_rl, harbor_rl, search_tool | need sandboxes or other services |
| verifiers_rl, multiplayer_rl.text_arena | need packages that are not installed here |
| rl_numerics_check | asks for a context of 262144 tokens of one named model |
| vlm_classifier, audio | images and sound are refused |
"""


@dataclass(frozen=True)
class Row:
    """Attributes:
    moved: what the test asserts, with the numbers of this run.
    machine: where it ran; the other rows may be from elsewhere.
    """

    recipe: str
    command: str
    steps: int
    moved: str
    seconds: float
    machine: str

    def line(self) -> str:
        numbers = (str(self.steps), self.moved, f"{self.seconds:.0f}")
        cells = (self.recipe, f"`{self.command}`", *numbers, self.machine)
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def draw(path: Path, rewards: Sequence[float]) -> None:
    """Draws the rewards of the long run, the same file from the same numbers."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "rewards"}
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3), layout="constrained")
    axes.plot(range(1, len(rewards) + 1), rewards, marker=".", color="tab:green")
    axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1.05))
    axes.grid(alpha=0.3)
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    pyplot.close(figure)
    path.write_text("".join(f"{line.rstrip()}\n" for line in drawn.getvalue().splitlines()))


def merged(text: str, rows: Mapping[str, str], head: str) -> str:
    """The document with these rows (recipe -> line) in the place of those of the same recipes in `text`."""
    kept = {found[1]: found[0] for found in re.finditer(r"^\| (\w[^|]*?) \| `.*\|$", text, re.MULTILINE)}
    lines = {**kept, **rows}
    tail = [line for line in _TAIL.splitlines() if line.removeprefix("| ").partition(" | ")[0] not in lines]
    return head + "\n".join([*(lines[recipe] for recipe in sorted(lines)), *tail, ""])


def write(path: Path, rows: list[Row], *, cookbook: str, policy: str, teacher: str) -> None:
    """Brings the document at `path` up to date."""
    head = _HEAD.format(cookbook=cookbook, policy=policy, teacher=teacher)
    text = path.read_text() if path.exists() else ""
    path.write_text(merged(text, {row.recipe: row.line() for row in rows}, head))
