"""The machines of a trainer whose ranks are on several, and what cannot be of them. Pure."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

LOOPBACK = "lo"


@dataclass(frozen=True)
class Nodes:
    """Several machines, or several agents on one.

    Attributes:
        count: of them.
        rank: which of them this one is; 0 is the head, which has rank 0 of the trainer.
        host, port: the head's, where all of them meet.
        interface: on which this node's ranks speak with the others.
        wait_s: within which all are there.
    """

    count: int
    rank: int
    host: str
    port: int
    interface: str = LOOPBACK
    wait_s: float = 900.0


def endpoint(text: str) -> tuple[str, int]:
    """HOST:PORT, the host an address; one of IPv6 is in brackets.

    Raises:
        ValueError: another form.
    """
    host, _, port = text.rpartition(":")
    address = ipaddress.ip_address(host.removeprefix("[").removesuffix("]") if "[" in host else host)
    if (":" in str(address)) != host.startswith("[") or not (port.isascii() and port.isdigit()):
        raise ValueError
    if not 1 <= int(port) <= 65535:
        raise ValueError
    return str(address), int(port)


def mistakes(nodes: Nodes, addresses: dict[str, list[str]]) -> list[str]:
    """What cannot be of these nodes on this machine: sentences that say what to change.

    Args:
        addresses: of this machine, by interface.
    """
    if not 0 <= nodes.rank < nodes.count:
        return [
            f"--node-rank {nodes.rank}: of {nodes.count} nodes the first is 0, the last {nodes.count - 1}"
        ]
    if nodes.interface not in addresses:
        return [f"--interface {nodes.interface}: here are {', '.join(sorted(addresses))}"]
    here = addresses[nodes.interface]
    at_home = ipaddress.ip_address(nodes.host).is_loopback
    if at_home != any(ipaddress.ip_address(address).is_loopback for address in here):
        which = "this machine's own" if at_home else "not of this machine alone"
        return [
            f"--rendezvous {nodes.host}:{nodes.port} is {which}, and --interface {nodes.interface} has "
            f"{', '.join(here) or 'no address'}: name the interface that reaches it"
        ]
    if nodes.rank == 0 and not at_home and nodes.host not in here:
        return [
            f"--rendezvous {nodes.host}:{nodes.port}: the head listens there, and its {nodes.interface} has "
            f"{', '.join(here)}"
        ]
    return []
