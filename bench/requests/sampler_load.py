"""A client in a process of its own: each job is a number of one-token samples, all asked for at once.

It sends what the SDK sent for one sample, byte for byte but for prompts and numbers: the SDK itself takes
several times the gateway's time for a sample, so with it a gateway would be measured that mostly waits.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import tinker

from bench.child import answer_jobs
from bench.requests.recorder import Recorded, Recorder
from bench.sampling.throughput import sample
from bench.stack import BASE_MODEL, random_tokens

PROMPT_TOKENS = 16
_CONNECTIONS = 64
_JOB_S = 600.0
"""A job that takes longer does not end, and its bench should say so."""


class _Connection(asyncio.Protocol):
    """One request at a time over a connection that stays open."""

    def __init__(self) -> None:
        self._received = b""
        self._answer: asyncio.Future[bytes] | None = None
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, rest = self._received.partition(b"\r\n\r\n")
        if not found:
            return
        size = int(head.lower().partition(b"\r\ncontent-length: ")[2].partition(b"\r\n")[0])
        if len(rest) < size:
            return
        assert self._answer is not None
        answer, self._answer, self._received = self._answer, None, rest[size:]
        if answer.done():
            # Given up meanwhile.
            return
        if head.split(b" ", 2)[1] == b"200":
            answer.set_result(rest[:size])
        else:
            answer.set_exception(RuntimeError(f"{head!r}: {rest[:size]!r}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(exc or EOFError("the gateway closed a connection"))

    async def post(self, request: Recorded, body: dict[str, Any]) -> Any:
        """The answer to a recorded request with another body."""
        if self._transport is None:
            raise EOFError("the gateway closed a connection")
        self._answer = asyncio.get_running_loop().create_future()
        for piece in request.with_body(json.dumps(body).encode()):
            self._transport.write(piece)
        return await self._answer

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


class _Load:
    """Samples of one sampling session, asked for over and over."""

    def __init__(self, base_url: str, recorded: list[Recorded]) -> None:
        at = urlsplit(base_url)
        assert at.hostname and at.port
        self._host, self._port = at.hostname, at.port
        self._sample, self._poll, self._fetch = (
            next(one for one in recorded if one.path == path)
            for path in ("asample", "retrieve_futures", "retrieve_future")
        )
        self._cursor = 0
        self._next_seq_id = 1000
        """Above those that were recorded."""

    async def samples(self, prompts: list[list[int]]) -> None:
        """One token for each prompt; ends when all results are here."""
        loop = asyncio.get_running_loop()
        connections = [await self._connected() for _ in range(_CONNECTIONS + 1)]
        free: asyncio.LifoQueue[_Connection] = asyncio.LifoQueue()
        for connection in connections[1:]:
            free.put_nowait(connection)
        resolved: dict[str, asyncio.Future[None]] = {}

        async def post(request: Recorded, body: dict[str, Any]) -> bytes:
            connection = await free.get()
            answer: bytes = await connection.post(request, body)
            free.put_nowait(connection)
            return answer

        async def one(body: dict[str, Any]) -> None:
            request_id = json.loads(await post(self._sample, body))["request_id"]
            await resolved.setdefault(request_id, loop.create_future())
            await post(self._fetch, {**json.loads(self._fetch.body), "request_id": request_id})

        try:
            # Whatever ends the polls ends the job.
            async with asyncio.timeout(_JOB_S), asyncio.TaskGroup() as group:
                polling = group.create_task(self._polled(connections[0], resolved))
                await asyncio.gather(*(one(self._body(prompt)) for prompt in prompts))
                polling.cancel()
        finally:
            for connection in connections:
                connection.close()

    async def _connected(self) -> _Connection:
        loop = asyncio.get_running_loop()
        return (await loop.create_connection(_Connection, self._host, self._port))[1]

    async def _polled(self, connection: _Connection, resolved: dict[str, asyncio.Future[None]]) -> None:
        """Tells which are resolved, as the SDK asks: one poll after the other, each with what was fetched."""
        loop = asyncio.get_running_loop()
        told: list[str] = []
        while True:
            body = {**json.loads(self._poll.body), "prev_cursor": self._cursor, "retrieved_request_ids": told}
            page = json.loads(await connection.post(self._poll, body))
            self._cursor = page["cursor"]
            told = [completion["request_id"] for completion in page["completions"]]
            for request_id in told:
                resolved.setdefault(request_id, loop.create_future()).set_result(None)

    def _body(self, prompt: list[int]) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(self._sample.body)
        body["prompt"]["chunks"][0]["tokens"] = prompt
        body["seq_id"] = self._next_seq_id
        self._next_seq_id += 1
        return body


def load(held: ExitStack) -> Callable[[Any], float]:
    """Records one sample of the SDK, whose session lives as long as what is held; a job is answered with its
    seconds."""
    base_url, api_key, vocab = sys.argv[1:4]
    rng = np.random.default_rng()
    recorder = held.enter_context(Recorder(base_url).running())
    service = held.enter_context(tinker.ServiceClient(base_url=recorder.url(), api_key=api_key))
    client = service.create_sampling_client(base_model=BASE_MODEL)
    sample([client], random_tokens(rng, int(vocab), 1, PROMPT_TOKENS), 1)
    samples = _Load(base_url, recorder.taken())

    def run(job: Any) -> float:
        prompts = random_tokens(rng, int(vocab), job["samples"], PROMPT_TOKENS)
        start = time.perf_counter()
        asyncio.run(samples.samples(prompts))
        return time.perf_counter() - start

    return run


if __name__ == "__main__":
    with ExitStack() as session:
        answer_jobs(lambda: load(session))
