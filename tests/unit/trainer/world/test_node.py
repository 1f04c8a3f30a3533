"""What a node of a trainer is told."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.common.worlds.nodes import Nodes
from services.launcher.machine import free_port
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
count, rank, port, *args = sys.argv[2:]
sys.exit(node._run(Nodes(int(count), int(rank), "127.0.0.1", int(port), "lo"), 2, args))
"""


def runs_ranks(program: str, nodes: int, rank: int, port: int, folder: Path) -> list[str]:
    """Command line of a node with two ranks of a program, which is given the folder."""
    place = (str(number) for number in (nodes, rank, port))
    return [sys.executable, "-c", RUNS_RANKS, program, *place, str(folder)]


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
    command = runs_ranks(RANK, 1, 0, 0, folder)
    ended = subprocess.run(command, timeout=120, check=False, capture_output=True, text=True)
    assert ended.returncode == 1
    # The one that died by itself, and not the one that was ended for it.
    assert "rank 1 ended with status 7" in ended.stderr
    assert "rank 0" not in ended.stderr
    assert [each.name for each in folder.iterdir()] == ["ready"]


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (1, "rank 3 ended with status 1"),
        (-11, "rank 3 was ended by signal 11"),
        (-9, "rank 3 was ended by signal 9, which the kernel sends where memory is lacking"),
    ],
)
def test_how_a_rank_ended_is_said_with_what_a_kill_mostly_means(status: int, said: str) -> None:
    assert node._how_it_ended(3, status) == said


TELLS_ITS_PLACE = """
import os, pathlib, sys
names = "RANK", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(" ".join(os.environ[name] for name in names))
"""


def test_each_rank_of_a_node_is_told_a_gpu_of_its_own_of_those_that_the_node_sees(tmp_path: Path) -> None:
    port = free_port()
    started = [
        subprocess.Popen(
            runs_ranks(TELLS_ITS_PLACE, 2, rank, port, tmp_path),
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "5,3"},
        )
        for rank in range(2)
    ]
    assert [each.wait(120) for each in started] == [0, 0]
    told = sorted(each.read_text() for each in tmp_path.iterdir())
    assert told == ["0 0 5,3 4 2 0", "1 1 5,3 4 2 0", "2 0 5,3 4 2 1", "3 1 5,3 4 2 1"]


def test_no_thread_of_a_node_follows_files_for_what_its_ranks_say() -> None:
    logs = node._OwnLogs().reify({0: {}, 1: {}})
    assert logs.stdouts == logs.stderrs == {0: "", 1: ""}
    assert logs.tee_stdouts == logs.tee_stderrs == {}
