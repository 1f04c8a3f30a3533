"""What a node of a trainer is told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from services.common.worlds.nodes import Nodes
from services.trainer.world import node


def test_one_node_is_told_its_ranks_alone() -> None:
    nodes, ranks, flags = node._parse(["--ranks", "2", "--", "--id", "trainer-0"])
    assert nodes == Nodes(1, 0, "127.0.0.1", 0, "lo")
    assert (ranks, flags) == (2, ["--id", "trainer-0"])


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--nodes", "2"], "several --nodes need a --rendezvous"),
        (["--rendezvous", "127.0.0.1:29400"], "--rendezvous and --interface are for several --nodes"),
        (["--interface", "lo"], "--rendezvous and --interface are for several --nodes"),
        (["--node-rank", "1"], "--node-rank 1: of 1 nodes the first is 0"),
        (["--ranks", "0"], "--ranks and --wait must be above 0"),
    ],
)
def test_what_a_node_cannot_be_told_is_refused(
    flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        node._parse(["--ranks", "2", *flags])
    assert sentence in capsys.readouterr().err


def test_a_node_logs_in_the_format_of_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert node._log_format(["--id", "t", "--log-format", "json"]) == "json"
    assert node._log_format(["--log-format=json"]) == "json"
    assert node._log_format(["--id", "t"]) == "text"
    monkeypatch.setenv("TINSMITH_LOG_FORMAT", "json")
    assert node._log_format(["--id", "t"]) == "json"


RUNS_RANKS = """
import sys
from services.common.worlds.nodes import Nodes
from services.trainer.world import node

node._LAST_WORDS_S = 1.0
node.rank_arguments = lambda args: ["-c", sys.argv[1], *args]
sys.exit(node._run(Nodes(1, 0, "127.0.0.1", 0, "lo"), 2, sys.argv[2:]))
"""
RANK = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
if os.environ["RANK"] == "1":
    while not (folder / "ready").exists():
        time.sleep(0.01)
    sys.exit(7)
signal.signal(signal.SIGTERM, lambda *_: (folder / "asked to stop").touch())
(folder / "ready").touch()
time.sleep(600)
"""


def test_a_rank_that_dies_ends_one_that_hangs_and_nobody_asks_that_to_take_leave(tmp_path: Path) -> None:
    # A dollar is nothing that torch's agent may put something in the place of.
    folder = tmp_path / "$$of ${local_rank}"
    folder.mkdir()
    ended = subprocess.run([sys.executable, "-c", RUNS_RANKS, RANK, str(folder)], timeout=120, check=False)
    assert ended.returncode == 1
    assert [each.name for each in folder.iterdir()] == ["ready"]
