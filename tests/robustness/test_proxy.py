"""The proxy disturbs as it is told."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.robustness.proxy import Wire


@pytest.fixture
def wire() -> Iterator[Wire]:
    made = Wire()
    yield made
    made.close()


@pytest.fixture
def client(wire: Wire) -> Iterator[socket.socket]:
    """A connection through the wire to a server that sends everything back."""
    listener = socket.create_server(("127.0.0.1", 0))

    def echo() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    def serve(connection: socket.socket) -> None:
        try:
            while data := connection.recv(1000):
                connection.sendall(data)
        except OSError:
            pass

    threading.Thread(target=echo, daemon=True).start()
    with socket.create_connection(
        ("127.0.0.1", wire.route(("127.0.0.1", 0), listener.getsockname()))
    ) as made:
        made.settimeout(60)
        made.sendall(b"first")
        assert made.recv(100) == b"first"
        yield made
    listener.close()


def test_a_delay_slows_both_directions(wire: Wire, client: socket.socket) -> None:
    wire.delay = 0.2
    started = time.monotonic()
    client.sendall(b"slow")
    assert client.recv(100) == b"slow"
    assert time.monotonic() - started > 0.39


@pytest.mark.parametrize("direction", ["to_client", "to_server"])
def test_what_a_closed_direction_holds_back_arrives_when_it_opens(
    wire: Wire, client: socket.socket, direction: str
) -> None:
    setattr(wire, direction, False)
    client.sendall(b"held")
    client.settimeout(0.3)
    with pytest.raises(TimeoutError):
        client.recv(100)
    wire.mend()
    client.settimeout(60)
    assert client.recv(100) == b"held"


def test_a_reset_is_seen_as_one(wire: Wire, client: socket.socket) -> None:
    wire.reset()
    with pytest.raises(ConnectionResetError):
        client.recv(100)
