"""What others' work costs a small request: a heartbeat under waiting samples, a forward beside training."""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import tinker

from bench.child import Child
from bench.rows import Row, alternate, milliseconds, seconds
from bench.stack import BASE_MODEL, Stack, next_token_datum, on_a_tiny_model, random_tokens, train
from bench.training.exactness import trainer_logprobs

WAITING = 2000
HEARTBEATS = 300
BOUND_MS = 50.0
_AT_ONCE = 100
_PROMPT_TOKENS = 16
_TRAINING, _TRAIN_ROWS, _TRAIN_TOKENS = 3, 32, 128
_FORWARDS = 20
# What a trainer on a CPU computes at once unless it is told otherwise.
_MICRO_BATCH_TOKENS = 1024


def heartbeats(stack: Stack) -> list[Row]:
    """p95 of session_heartbeat while 2,000 samples are accepted and unfinished, each with an open long poll.

    One connection a poll is the most that any SDK opens; those that use retrieve_futures open one in all.
    """
    headers = {"X-API-Key": stack.api_key}
    with httpx.Client(base_url=f"{stack.base_url}/api/v1/", headers=headers, timeout=60.0) as http:
        session = _post(http, "create_session", {"tags": [], "sdk_version": tinker.__version__})["session_id"]
        opening = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE_MODEL}
        sampler = _post(http, "create_sampling_session", opening)["sampling_session_id"]
        beat = {"session_id": session}

        def measured() -> list[float]:
            return [seconds(lambda: _post(http, "session_heartbeat", beat)) for _ in range(HEARTBEATS)]

        idle = measured()
        with _waiting(stack, sampler):
            busy = measured()
        _post(http, f"sessions/{session}/finish", {"reason": {"type": "success"}})
    value = _p95_ms(busy)
    row = Row(
        "heartbeat under 2,000 waiting samples, p95",
        value,
        "ms",
        at_most=BOUND_MS,
        details={
            "p50_ms": round(1e3 * statistics.median(busy), 2),
            "idle_p95_ms": round(_p95_ms(idle), 2),
            "waiting": WAITING,
            "repetitions": HEARTBEATS,
        },
    )
    return [row]


def small_forwards(stack: Stack) -> list[Row]:
    """A forward of 16 tokens of one tenant while three train 32 x 128 tokens each, over and over.

    The measure is what it waits, in times of one micro-batch of training: it should wait for the one that
    runs and for no other. One micro-batch is a forward_backward of so many tokens by itself.
    """
    rng = np.random.default_rng(12)
    data = [next_token_datum(row) for row in random_tokens(rng, stack.vocab, _TRAIN_ROWS, _TRAIN_TOKENS + 1)]
    short = random_tokens(rng, stack.vocab, 1, _PROMPT_TOKENS + 1)
    model, tenants = stack.new_model(), [stack.new_model() for _ in range(_TRAINING)]
    one = data[: _MICRO_BATCH_TOKENS // _TRAIN_TOKENS]

    def forward() -> float:
        return seconds(lambda: trainer_logprobs(model, short))

    def micro_batch() -> float:
        return seconds(lambda: tenants[0].forward_backward(one, "cross_entropy").result())

    alternate(3, lambda _: forward(), lambda _: micro_batch())
    idle, passes = alternate(_FORWARDS, lambda _: forward(), lambda _: micro_batch())
    stop = threading.Event()

    def keep_training(tenant: tinker.TrainingClient) -> None:
        while not stop.is_set():
            train(tenant, data, 1e-4)

    with ThreadPoolExecutor(_TRAINING) as pool:
        training = [pool.submit(keep_training, tenant) for tenant in tenants]
        try:
            for _ in range(3):
                forward()
            busy = [forward() for _ in range(_FORWARDS)]
        finally:
            stop.set()
        for ended in training:
            ended.result()
    waited = statistics.median(busy) - statistics.median(idle)
    return [
        Row(
            "forward of 16 tokens beside three tenants that train: its wait, p50",
            waited / statistics.median(passes),
            "micro-batches",
            at_most=1.0,
            details={
                "p50_ms": milliseconds(busy),
                "p90_ms": round(1e3 * statistics.quantiles(busy, n=10)[-1], 2),
                "idle_p50_ms": milliseconds(idle),
                "micro_batch_p50_ms": milliseconds(passes),
                "repetitions": _FORWARDS,
            },
        )
    ]


def small_forwards_on_a_tiny_model(stack: Stack) -> list[Row]:
    """The same on the model of the tests, whose passes are short, with the tenants in processes of their own:
    what a small request takes where its own passage through the services counts."""
    with on_a_tiny_model(stack) as tiny, contextlib.ExitStack() as tenants:
        model = tiny.new_model()
        short = random_tokens(np.random.default_rng(12), tiny.vocab, 1, _PROMPT_TOKENS + 1)

        def forwards(times: int) -> list[float]:
            return [seconds(lambda: trainer_logprobs(model, short)) for _ in range(times)]

        forwards(5)
        idle = forwards(_FORWARDS)
        arguments = [tiny.base_url, tiny.api_key, str(tiny.vocab)]
        for number in range(_TRAINING):
            log = tiny.scratch / f"tenant-{number}.log"
            tenant = tenants.enter_context(
                contextlib.closing(Child("bench.requests.tenant", arguments, {}, log))
            )
            tenant.ask({})
        forwards(5)
        busy = forwards(3 * _FORWARDS)
    return [
        Row(
            "forward of 16 tokens beside three tenants that train 32 x 128 on a tiny model, p50",
            milliseconds(busy),
            "ms",
            at_most=150.0,
            details={
                "p90_ms": round(1e3 * statistics.quantiles(busy, n=10)[-1], 2),
                "idle_p50_ms": milliseconds(idle),
                "repetitions": len(busy),
            },
        )
    ]


def _p95_ms(times: list[float]) -> float:
    return 1e3 * statistics.quantiles(times, n=20)[-1]


def _post(http: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = http.post(path, json=body).raise_for_status().json()
    return answer


@contextlib.contextmanager
def _waiting(stack: Stack, sampler: str) -> Iterator[None]:
    """2,000 samples of the longest kind with an open poll each; given up at the end."""
    prompts = random_tokens(np.random.default_rng(8), stack.vocab, WAITING, _PROMPT_TOKENS)
    bodies = [
        {
            "sampling_session_id": sampler,
            "seq_id": number,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": prompt}]},
            "sampling_params": {"stop": []},
        }
        for number, prompt in enumerate(prompts)
    ]
    client = _Client(stack.base_url, stack.api_key)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="waiting samples", daemon=True)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(client.submit(bodies), loop).result(600)
        yield
        asyncio.run_coroutine_threadsafe(client.give_up(), loop).result(600)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


class _Client:
    """HTTP/1.1 over plain streams: thousands of idle connections cost it nothing."""

    def __init__(self, base_url: str, api_key: str) -> None:
        self._url = urlsplit(base_url)
        self._key = api_key
        self._polls: list[asyncio.StreamWriter] = []
        self._requests: list[str] = []
        self._at_once = asyncio.Semaphore(_AT_ONCE)

    async def submit(self, bodies: list[dict[str, Any]]) -> None:
        """Sends the samples and opens their polls."""
        answers = await asyncio.gather(*(self._post("asample", body) for body in bodies))
        self._requests = [answer["request_id"] for answer in answers]
        await asyncio.gather(*(self._poll(request_id) for request_id in self._requests))

    async def give_up(self) -> None:
        """Cancels what is left and closes the polls."""
        await asyncio.gather(*(self._post("cancel_future", {"request_id": name}) for name in self._requests))
        for writer in self._polls:
            writer.close()

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        async with self._at_once:
            reader, writer = await self._send(path, body, "close")
            answer = await reader.read()
            writer.close()
        head, _, content = answer.partition(b"\r\n\r\n")
        if b" 200 " not in head.splitlines()[0]:
            raise RuntimeError(f"{path}: {answer[:500]!r}")
        found: dict[str, Any] = json.loads(content)
        return found

    async def _poll(self, request_id: str) -> None:
        async with self._at_once:
            _, writer = await self._send("retrieve_future", {"request_id": request_id}, "keep-alive")
        self._polls.append(writer)

    async def _send(
        self, path: str, body: dict[str, Any], connection: str
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(self._url.hostname, self._url.port)
        content = json.dumps(body).encode()
        head = (
            f"POST /api/v1/{path} HTTP/1.1\r\nHost: {self._url.netloc}\r\nX-API-Key: {self._key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n"
            f"Connection: {connection}\r\n\r\n"
        )
        writer.write(head.encode() + content)
        await writer.drain()
        return reader, writer
