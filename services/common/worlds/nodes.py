"""The machines of a trainer with several ranks, and what cannot be of them. Pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass

LOOPBACK = "lo"
LOOPBACK_ADDRESS = "127.0.0.1"

INTERFACE = "GLOO_SOCKET_IFNAME"
"""Variable of the environment: the network interface that gloo is on, several with commas between; empty:
that of the machine's name."""
WEIGHTS_INTERFACE = "TINSMITH_WEIGHTS_INTERFACE"
"""The same of what goes to samplers, in a process whose ranks are on another one."""


def on_loopback(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables of ranks that are all on one machine, whose networks they have no business on. What goes to
    samplers, which may be elsewhere, stays where it was."""
    weights = environment.get(WEIGHTS_INTERFACE, environment.get(INTERFACE, ""))
    return {INTERFACE: LOOPBACK, WEIGHTS_INTERFACE: weights}


@dataclass(frozen=True)
class Nodes:
    """Several machines, several agents on one, or one agent, which meets nobody.

    Attributes:
        count: of them.
        rank: which of them this one is; 0 is the head, which has rank 0 of the trainer.
        host, port: the head's, where all of them meet: an address, or, to followers, also a name that may
            have another one at the head's next start. Of one agent port 0 is any that is free.
        interface: on which this node's ranks speak with the others.
        wait_s: within which all are there.
    """

    count: int
    rank: int
    host: str
    port: int
    interface: str = LOOPBACK
    wait_s: float = 900.0


_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9])?")


def endpoint(text: str) -> tuple[str, int]:
    """HOST:PORT, the host an address or a name; an address may be in brackets, one of IPv6 must be.

    Raises:
        ValueError: another form.
    """
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        raise ValueError
    if host.startswith("[") and host.endswith("]"):
        return str(ipaddress.ip_address(host[1:-1])), int(port)
    if not _NAME.fullmatch(host):
        raise ValueError
    if host.rpartition(".")[2].isdigit():
        ipaddress.ip_address(host)
    return host, int(port)


def mistakes(nodes: Nodes, addresses: Mapping[str, list[str]], prefix: str = "--") -> list[str]:
    """What cannot be of these nodes on this machine: sentences that say what to change.

    Args:
        addresses: of this machine, by interface.
        prefix: what flags begin with.
    """
    if not 0 <= nodes.rank < nodes.count:
        return [
            f"--node-rank {nodes.rank}: of {nodes.count} nodes the first is 0, the last {nodes.count - 1}"
        ]
    if nodes.interface not in addresses:
        return [f"{prefix}interface {nodes.interface}: here are {', '.join(sorted(addresses))}"]
    where = f"{prefix}rendezvous {nodes.host}:{nodes.port}"
    address = _address(nodes.host)
    if address is None and nodes.rank == 0:
        return [
            f"{where} is a name: the head listens on an address of its own, so give it that, and the name to "
            "the others"
        ]
    here = addresses[nodes.interface]
    at_home = address is not None and address.is_loopback
    if at_home != any(ipaddress.ip_address(address).is_loopback for address in here):
        which = "this machine's own" if at_home else "not of this machine alone"
        return [
            f"{where} is {which}, and {prefix}interface {nodes.interface} has "
            f"{', '.join(here) or 'no address'}: name the interface that reaches it"
        ]
    if nodes.rank == 0 and not at_home and nodes.host not in here:
        return [f"{where}: the head listens there, and its {nodes.interface} has {', '.join(here)}"]
    return []


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """None = it is a name, which is another machine's but for localhost."""
    try:
        return ipaddress.ip_address(LOOPBACK_ADDRESS if host == "localhost" else host)
    except ValueError:
        return None
