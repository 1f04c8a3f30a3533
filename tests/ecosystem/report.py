"""docs/cookbook.md: which recipes ran, and what moved.

Invariant: a row comes from a run whose assertions held. A run of some tests replaces its own rows and leaves
the others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_HEAD = """\
# The cookbook's recipes on Tinsmith

Written by `make test-ecosystem`. Each row is a recipe of `tinker-cookbook` {cookbook} as it is in its wheel,
started with `python -m tinker_cookbook.recipes.` and the command below, against one cluster of `tinsmith up`,
without a hub, on {machine}. POLICY is a Qwen3 of two layers that has learned to
guess, served as `{policy}`; data sets are small files under the hub's names in the working directory. The
cluster has `--stable-reinforce-as ppo`, for the recipes that use stable_reinforce unless `loss_fn` says
otherwise. The tests in `tests/ecosystem` assert what each row says.

| Recipe | Command | Steps | What moved | Seconds |
|---|---|---:|---|---:|
"""

_TAIL = """
## Not in the table

| Recipe | Why |
|---|---|
| prompt_distillation.create_data | its teacher's name is fixed: serve a model as `Qwen/Qwen3.6-35B-A3B` |
| rl_basic | rl_loop by another way; no option makes its batches of 128 problems smaller |
| multiplayer_rl.twenty_questions | it plays its turns, but so small a model never wins |
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
    """

    recipe: str
    command: str
    steps: int
    moved: str
    seconds: float

    def line(self) -> str:
        cells = (self.recipe, f"`{self.command}`", str(self.steps), self.moved, f"{self.seconds:.0f}")
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def merged(text: str, rows: Mapping[str, str], head: str) -> str:
    """The document with these rows (recipe -> line) in the place of those of the same recipes in `text`."""
    kept = {found[1]: found[0] for found in re.finditer(r"^\| (\w[^|]*?) \| `.*\|$", text, re.MULTILINE)}
    lines = {**kept, **rows}
    return head + "".join(f"{lines[recipe]}\n" for recipe in sorted(lines)) + _TAIL


def write(path: Path, rows: list[Row], *, cookbook: str, machine: str, policy: str) -> None:
    """Brings the document at `path` up to date."""
    head = _HEAD.format(cookbook=cookbook, machine=machine, policy=policy)
    text = path.read_text() if path.exists() else ""
    path.write_text(merged(text, {row.recipe: row.line() for row in rows}, head))
