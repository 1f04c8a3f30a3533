"""Waits that end with their client."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from starlette.requests import ClientDisconnect, Request

from services.gateway.edge.http.routes import Call


class Client:
    """The other side of a request whose body was read."""

    def __init__(self) -> None:
        self.went = asyncio.Event()
        self.listened_to = False

    async def receive(self) -> dict[str, Any]:
        self.listened_to = True
        try:
            await self.went.wait()
        finally:
            self.listened_to = False
        return {"type": "http.disconnect"}

    def call(self) -> Call:
        request = Request({"type": "http"}, self.receive)
        return Call(request, *(cast(Any, None) for _ in range(4)))


async def test_who_waits_has_the_answer_and_its_client_is_listened_to_no_longer() -> None:
    client, answer = Client(), asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(client.call().while_there(_of(answer)))
    await asyncio.sleep(0.01)
    assert client.listened_to
    answer.set_result("an answer")
    assert await waiting == "an answer"
    await asyncio.sleep(0)
    assert not client.listened_to


async def test_a_wait_ends_when_its_client_goes() -> None:
    client, answer = Client(), asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(client.call().while_there(_of(answer)))
    await asyncio.sleep(0.01)
    client.went.set()
    with pytest.raises(ClientDisconnect):
        await waiting
    assert answer.cancelled()


async def test_a_client_that_goes_in_the_moment_of_its_answer_has_it() -> None:
    loop = asyncio.get_running_loop()
    troubles: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, about: troubles.append(about))
    client, answer = Client(), loop.create_future()
    waiting = asyncio.create_task(client.call().while_there(_of(answer)))
    await asyncio.sleep(0.01)
    answer.set_result("an answer")
    client.went.set()
    assert await waiting == "an answer"
    await asyncio.sleep(0.01)
    assert not troubles


async def test_a_wait_that_runs_out_of_its_own_time_says_so() -> None:
    async def late() -> None:
        raise TimeoutError("too late")

    with pytest.raises(TimeoutError, match="too late"):
        await Client().call().while_there(late())


async def _of(answer: asyncio.Future[str]) -> str:
    return await answer
