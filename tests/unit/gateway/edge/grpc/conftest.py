"""A connection to the public service."""

from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest

from services.common.process import rpc
from tests.unit.gateway.edges import Edges


@pytest.fixture
async def channel(edges: Edges) -> AsyncIterator[grpc.aio.Channel]:
    async with rpc.channel(edges.grpc_address) as found:
        yield found
