"""The machines of a trainer."""

from __future__ import annotations

import pytest

from services.common.worlds.nodes import Nodes, endpoint, mistakes, on_loopback

HERE = {"lo": ["127.0.0.1", "::1"], "eth0": ["10.0.0.7", "fe80::1%eth0"], "down0": []}


def test_an_endpoint_is_an_address_or_a_name_and_a_port() -> None:
    assert endpoint("10.0.0.7:29400") == ("10.0.0.7", 29400)
    assert endpoint("[10.0.0.7]:29400") == ("10.0.0.7", 29400)
    assert endpoint("[::1]:29400") == ("::1", 29400)
    assert endpoint("head-0.nodes.svc:1") == ("head-0.nodes.svc", 1)


@pytest.mark.parametrize(
    "text",
    [
        "10.0.0.7",
        "a b:1",
        "-a:1",
        "10.0.0.7:0",
        "10.0.0.7:65536",
        ":1",
        "::1:29400",
        "[head]:1",
        "[]:1",
        "10.0.0.300:1",
        "1.2.3.4:x",
    ],
)
def test_other_forms_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        endpoint(text)


@pytest.mark.parametrize(
    "nodes",
    [
        Nodes(2, 0, "127.0.0.1", 1),
        Nodes(2, 1, "127.0.0.2", 1),
        Nodes(1, 0, "::1", 1),
        Nodes(2, 0, "10.0.0.7", 1, "eth0"),
        Nodes(2, 1, "10.0.0.9", 1, "eth0"),
        Nodes(2, 1, "head", 1, "eth0"),
        Nodes(2, 1, "localhost", 1),
    ],
)
def test_what_can_be_is_taken(nodes: Nodes) -> None:
    assert mistakes(nodes, HERE) == []


@pytest.mark.parametrize(
    ("nodes", "sentence"),
    [
        (Nodes(2, 2, "127.0.0.1", 1), "--node-rank 2: of 2 nodes the first is 0, the last 1"),
        (Nodes(2, 0, "10.0.0.7", 1, "eth1"), "--interface eth1: here are down0, eth0, lo"),
        (
            Nodes(2, 0, "10.0.0.7", 1),
            "--rendezvous 10.0.0.7:1 is not of this machine alone, and --interface lo",
        ),
        (
            Nodes(2, 1, "127.0.0.1", 1, "eth0"),
            "--rendezvous 127.0.0.1:1 is this machine's own, and --interface",
        ),
        (Nodes(2, 0, "head", 1, "eth0"), "--rendezvous head:1 is a name: the head listens on an address"),
        (Nodes(2, 1, "head", 1), "--rendezvous head:1 is not of this machine alone, and --interface lo"),
        (
            Nodes(2, 0, "10.0.0.9", 1, "eth0"),
            "--rendezvous 10.0.0.9:1: the head listens there, and its eth0 has",
        ),
    ],
)
def test_what_cannot_be_is_said(nodes: Nodes, sentence: str) -> None:
    (found,) = mistakes(nodes, HERE)
    assert found.startswith(sentence)


@pytest.mark.parametrize(
    ("says", "interface"),
    [
        ({}, ""),
        ({"GLOO_SOCKET_IFNAME": "eth0"}, "eth0"),
        ({"GLOO_SOCKET_IFNAME": "eth0", "TINSMITH_WEIGHTS_INTERFACE": "eth1"}, "eth1"),
    ],
)
def test_ranks_of_one_machine_are_on_loopback_and_weights_where_they_were(
    says: dict[str, str], interface: str
) -> None:
    once = on_loopback(says)
    assert once == {"GLOO_SOCKET_IFNAME": "lo", "TINSMITH_WEIGHTS_INTERFACE": interface}
    assert on_loopback(once) == once
