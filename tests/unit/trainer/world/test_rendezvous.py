"""Where the nodes of a trainer meet."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from torch.distributed.elastic.rendezvous import RendezvousInfo

from services.common.contract.errors import Internal, Unavailable
from services.common.worlds.nodes import Nodes
from services.launcher.machine import free_port
from services.trainer.world import refusals, rendezvous
from services.trainer.world.rendezvous import Rendezvous

# Loopback, and not the address that everything else here listens on.
HOST = "127.0.0.2"


def node(rank: int, port: int, wait: float = 60, count: int = 2) -> Nodes:
    return Nodes(count, rank, HOST, port, wait_s=wait)


def meet(*nodes: Nodes) -> list[RendezvousInfo]:
    """What each of them learns. Their handlers live as long as the meeting does."""
    with ThreadPoolExecutor(len(nodes)) as pool:
        return list(pool.map(lambda each: Rendezvous(each).next_rendezvous(), nodes))


def test_the_head_is_the_first_whoever_comes_first_and_listens_on_its_address_alone() -> None:
    port = free_port()
    met = meet(node(2, port, count=3), node(1, port, count=3), node(0, port, count=3))
    assert [(each.rank, each.world_size) for each in met] == [(2, 3), (1, 3), (0, 3)]
    places = [each.bootstrap_store_info for each in met]
    ((address, master_port),) = {(each.master_addr, each.master_port) for each in places if each is not None}
    assert None not in places
    assert (address, master_port) == (HOST, port)
    listening = [
        found.laddr.ip
        for found in psutil.Process().net_connections("inet")
        if found.status == psutil.CONN_LISTEN and found.laddr.port == port
    ]
    assert listening == [HOST]


def test_one_node_waits_for_nobody_takes_a_free_port_and_hears_its_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(refusals.VARIABLE, "")
    alone = Rendezvous(node(0, 0, wait=0.1, count=1))
    met = alone.next_rendezvous()
    assert (met.rank, met.world_size) == (0, 1)
    assert met.bootstrap_store_info is not None and met.bootstrap_store_info.master_addr == HOST
    assert not alone.is_over() and alone.refusal() == ""
    refusals.tell("rank 1: give less")
    assert alone.is_over() and alone.refusal() == "rank 1: give less"
    monkeypatch.setattr(rendezvous, "_HEARD_S", 3600)
    alone.until_heard()


def test_a_node_that_does_not_come_is_named() -> None:
    port = free_port()
    with pytest.raises(Unavailable, match=f"of 2 nodes, node 1 did not come to {HOST}:{port} within 0.5 s"):
        Rendezvous(node(0, port, wait=0.5)).next_rendezvous()


def test_a_node_without_a_head_says_so() -> None:
    port = free_port()
    with pytest.raises(Unavailable, match=f"node 1 did not meet the head at {HOST}:{port} .*was no head"):
        Rendezvous(node(1, port, wait=0.5)).next_rendezvous()


def test_to_each_start_of_the_head_a_node_comes_once() -> None:
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        head = Rendezvous(node(0, port))
        first = [pool.submit(head.next_rendezvous), pool.submit(Rendezvous(node(1, port)).next_rendezvous)]
        assert [each.result(60).rank for each in first] == [0, 1]
        with pytest.raises(
            Unavailable, match="where node 1 has been: another node has its rank, or the head"
        ):
            Rendezvous(node(1, port, wait=2)).next_rendezvous()

        # It waits for the end of that start, and comes to the next one.
        again = pool.submit(Rendezvous(node(1, port)).next_rendezvous)
        del head, first
        next_head = pool.submit(Rendezvous(node(0, port)).next_rendezvous)
        assert (next_head.result(60).rank, again.result(60).rank) == (0, 1)


def both(port: int) -> tuple[Rendezvous, Rendezvous]:
    """A head and its follower, which have met."""
    head, follower = Rendezvous(node(0, port)), Rendezvous(node(1, port))
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(Rendezvous.next_rendezvous, (head, follower)))
    return head, follower


def becomes_over(follower: Rendezvous) -> None:
    deadline = time.monotonic() + 60
    while not follower.is_over():
        assert time.monotonic() < deadline, "it waits on"
        time.sleep(0.01)


def test_a_follower_hears_what_the_head_alone_is_refused_for_before_the_head_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rendezvous, "_ENDS_S", 0.0)
    monkeypatch.setenv(refusals.VARIABLE, "")
    port = free_port()
    head, follower = both(port)
    assert not follower.is_over() and follower.refusal() == ""
    refusals.announce(HOST, port)
    refusals.tell("rank 0: give less")
    assert head.is_over() and head.refusal() == "rank 0: give less"
    head.until_heard()
    becomes_over(follower)
    assert follower.refusal() == "rank 0: give less"


def test_a_follower_whose_head_has_gone_without_a_word_does_not_wait_for_its_ranks_to_notice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rendezvous, "_ENDS_S", 0.0)
    head, follower = both(free_port())
    assert not follower.is_over()
    del head
    becomes_over(follower)
    assert follower.refusal() == ""


def test_a_follower_that_cannot_hear_its_head_any_more_ends_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(_: object) -> str:
        raise ValueError("not what a store says")

    monkeypatch.setattr(rendezvous, "_AGAIN_S", 0.01)
    monkeypatch.setattr(refusals, "heard", fails)
    head, follower = both(free_port())
    with pytest.raises(Internal, match=r"node 1 does not hear the head any more.*not what a store says"):
        becomes_over(follower)
    del head


def test_a_head_does_not_wait_for_a_follower_that_never_hears_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_HEARD_S", 0.1)
    monkeypatch.setenv(refusals.VARIABLE, "")
    port = free_port()
    head, _ = both(port)
    head.until_heard()


def test_a_node_finds_the_head_by_a_name() -> None:
    port = free_port()
    head = Nodes(2, 0, "127.0.0.1", port, wait_s=60)
    follower = Nodes(2, 1, "localhost", port, wait_s=60)
    met = meet(follower, head)
    assert [each.rank for each in met] == [1, 0]
    # Ranks meet where the head said, whatever its name is.
    assert {each.bootstrap_store_info.master_addr for each in met if each.bootstrap_store_info} == {
        "127.0.0.1"
    }


def test_a_name_that_nobody_has_yet_is_asked_for_again() -> None:
    with pytest.raises(Unavailable, match=r"did not meet the head at nobody\.invalid:29400 .*was no head"):
        Rendezvous(Nodes(2, 1, "nobody.invalid", 29400, wait_s=1.5)).next_rendezvous()
