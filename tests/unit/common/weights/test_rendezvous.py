"""Ranks meet on the address that they are told."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psutil

from services.common.weights.rendezvous import tcp_store
from services.launcher.machine import free_port

# Loopback, and not the address that everything else here listens on.
HOST = "127.0.0.2"
TIMEOUT = timedelta(seconds=60)


def test_the_store_listens_on_that_address_alone() -> None:
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(tcp_store, HOST, port, 0, 2, TIMEOUT)
        other = tcp_store(HOST, port, 1, 2, TIMEOUT)
        other.set("said", "by rank 1")
        store = serving.result(60)
    assert store.get("said") == b"by rank 1"
    listening = [
        found.laddr.ip
        for found in psutil.Process().net_connections("inet")
        if found.status == psutil.CONN_LISTEN and found.laddr.port == port
    ]
    assert listening == [HOST]
