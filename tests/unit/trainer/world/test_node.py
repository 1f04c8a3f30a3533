"""What a node of a trainer is told."""

from __future__ import annotations

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
