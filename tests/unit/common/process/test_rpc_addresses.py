"""Addresses that gRPC can read."""

from __future__ import annotations

import pytest

from services.common.process import rpc


@pytest.mark.parametrize(
    ("host", "port", "expected"),
    [
        ("127.0.0.1", 9000, "127.0.0.1:9000"),
        ("a-pod.example", 0, "a-pod.example:0"),
        ("::", 9000, "[::]:9000"),
        ("fd00::1", 1, "[fd00::1]:1"),
    ],
)
def test_an_ipv6_address_stands_in_brackets(host: str, port: int, expected: str) -> None:
    assert rpc.address(host, port) == expected
