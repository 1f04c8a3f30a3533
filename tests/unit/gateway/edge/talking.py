"""A whole gateway over a real Redis, with a sampler that says what a test has it say.

The sampler isolates the edges for text: it keeps the contract of sampler.proto, and its "model" is a function
of the request.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import httpx
import numpy as np
import tokenizers

from services.common.contract import errors
from services.common.contract.errors import TinsmithError, Unavailable
from services.common.contract.experts.routing import Routing
from services.common.state import redis_client
from services.common.storage.data_dir import DataDir
from services.common.storage.location import connect
from services.gateway.access.limits import Limits
from services.gateway.edge.http.server import HttpServer
from services.gateway.identity.key_store import KeyStore
from services.gateway.identity.ring import KeyRing
from services.gateway.text.tokenizer import Tokenizer
from services.gateway.wiring import Gateway
from services.launcher.tiny_model import write_tokenizer
from tests.unit.gateway.scripted_services import BASE, ScriptedSampler, serving
from tinsmith.internal.v1 import sampler_pb2
from tinsmith.v1 import sampling_pb2, types_pb2

ALICE, BOB = "tml-alice", "tml-bob"
VOCAB, CONTEXT = 512, 1024
END = "<|im_end|>"


@dataclass(frozen=True)
class Says:
    """One sequence: its text, and whether it ended at its length or at a stop."""

    text: str
    stopped: bool = True


@dataclass(eq=False)
class TalkingSampler(ScriptedSampler):
    """Says `script(request)`: one Says for each sequence, or raises what it comes to. `gate` holds the end of
    what it says, and `half` the second half of each sequence."""

    tokenizer_json: str
    chat_template: str
    script: Callable[[sampler_pb2.SampleRequest], Sequence[Says]] = lambda request: (
        [Says(f"hello {END}")] * request.num_samples
    )
    asked: list[sampler_pb2.SampleRequest] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__("sampler-0")
        self.tokenizer = Tokenizer(self.tokenizer_json, self.chat_template, {"eos_token": END})
        self.half = asyncio.Event()
        self.half.set()
        self.gave_up = asyncio.Event()
        self.breaks = 0
        """Streams that end without a result after their first halves."""
        self.answer = self._result

    def prompt(self, which: int = -1) -> str:
        """The text of a prompt that it was asked, special tokens shown."""
        tokens = np.frombuffer(self.asked[which].prompt.data, "<i4").tolist()
        return tokenizers.Tokenizer.from_str(self.tokenizer_json).decode(tokens, skip_special_tokens=False)

    def count(self, text: str) -> int:
        """Tokens of a text."""
        return len(self.tokenizer.tokens(text, special=False))

    def _result(self, request: sampler_pb2.SampleRequest) -> sampler_pb2.SampleResponse:
        self.asked.append(request)
        try:
            said = self.script(request)
        except TinsmithError as error:
            return sampler_pb2.SampleResponse(error=errors.to_pb(error))
        result = sampling_pb2.SampleResult(prompt_cache_hit_tokens=2)
        for one in said:
            reason = sampling_pb2.STOP_REASON_STOP if one.stopped else sampling_pb2.STOP_REASON_LENGTH
            tokens = self.tokenizer.tokens(one.text, special=False)
            result.sequences.append(self._sequence(request, tokens, 0))
            result.sequences[-1].stop_reason = reason
        if request.prompt_logprobs:
            count = request.prompt.shape[0]
            result.prompt_logprobs.CopyFrom(floats([float("nan"), *(-1.0 * i for i in range(1, count))]))
            k = request.topk_prompt_logprobs
            if k:
                result.topk_prompt_logprobs.CopyFrom(topk([list(range(k))] * count))
        return sampler_pb2.SampleResponse(result=result)

    def _sequence(
        self, request: sampler_pb2.SampleRequest, tokens: list[int], start: int
    ) -> sampling_pb2.SampledSequence:
        k = request.topk_sample_logprobs
        return sampling_pb2.SampledSequence(
            tokens=ints(tokens),
            logprobs=floats([-0.5 * (start + i) for i in range(len(tokens))]),
            versions=[sampling_pb2.VersionSpan(version=request.snapshot.version, tokens=len(tokens))],
            topk_logprobs=topk([[token, *range(k - 1)] for token in tokens]) if k else None,
        )

    async def StreamSample(
        self, request: sampler_pb2.StreamSampleRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[sampler_pb2.StreamSampleResponse]:
        self.arrived.set()
        response = self._result(request.sample)
        for index, start, token, late in _steps(response.result):
            if late and self.breaks:
                self.breaks -= 1
                raise Unavailable("the engine ended")
            if late:
                await self.half.wait()
            added = self._sequence(request.sample, [token], start)
            delta = sampler_pb2.SequenceDelta(
                index=index, start=start, added=added, version=request.sample.snapshot.version
            )
            yield sampler_pb2.StreamSampleResponse(new_tokens=sampler_pb2.NewTokens(sequences=[delta]))
        await self.gate.wait()
        yield sampler_pb2.StreamSampleResponse(last=response)

    async def EndSample(
        self, request: sampler_pb2.EndSampleRequest, context: grpc.aio.ServicerContext
    ) -> sampler_pb2.EndSampleResponse:
        self.gave_up.set()
        return await super().EndSample(request, context)

    async def GetTokenizer(
        self, request: sampler_pb2.GetTokenizerRequest, context: grpc.aio.ServicerContext
    ) -> sampler_pb2.GetTokenizerResponse:
        return sampler_pb2.GetTokenizerResponse(
            tokenizer_json=self.tokenizer_json,
            chat_template=self.chat_template,
            special_tokens={"eos_token": END},
        )


def _steps(result: sampling_pb2.SampleResult) -> Iterator[tuple[int, int, int, bool]]:
    """Index, place and id of every token, the sequences in turns, and whether it is of a second half."""
    sequences = [np.frombuffer(one.tokens.data, "<i4").tolist() for one in result.sequences]
    for start in range(max(map(len, sequences), default=0)):
        for index, tokens in enumerate(sequences):
            if start < len(tokens):
                yield index, start, tokens[start], 2 * start >= len(tokens)


def ints(values: list[int]) -> types_pb2.Tensor:
    data = np.array(values, "<i4").tobytes()
    return types_pb2.Tensor(dtype=types_pb2.DATA_TYPE_INT32, shape=[len(values)], data=data)


def floats(values: list[float]) -> types_pb2.Tensor:
    data = np.array(values, "<f4").tobytes()
    return types_pb2.Tensor(dtype=types_pb2.DATA_TYPE_FLOAT32, shape=[len(values)], data=data)


def topk(ids: list[list[int]]) -> sampling_pb2.TopkLogprobs:
    rows = np.array(ids, "<i4")
    logprobs = np.tile(-1.0 * np.arange(rows.shape[1], dtype="<f4"), (rows.shape[0], 1))
    return sampling_pb2.TopkLogprobs(
        token_ids=types_pb2.Tensor(dtype=types_pb2.DATA_TYPE_INT32, shape=rows.shape, data=rows.tobytes()),
        logprobs=types_pb2.Tensor(
            dtype=types_pb2.DATA_TYPE_FLOAT32, shape=rows.shape, data=logprobs.tobytes()
        ),
    )


@dataclass
class Talking:
    """Where the gateway listens, and what stands behind it."""

    url: str
    gateway: Gateway
    sampler: TalkingSampler

    def http(self, key: str = ALICE) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=20)


@asynccontextmanager
async def talking(redis_url: str, directory: Path) -> AsyncIterator[Talking]:
    """A gateway on a free port, and its sampler."""
    (directory / "keys").write_text(f"{ALICE} alice\n{BOB} bob\n")
    write_tokenizer(directory, VOCAB, CONTEXT)
    template = json.loads((directory / "tokenizer_config.json").read_text())["chat_template"]
    sampler = TalkingSampler((directory / "tokenizer.json").read_text(), template)
    client = redis_client.connect(redis_url)
    await client.flushall()
    data = DataDir(directory)
    announced = {"vocab_size": VOCAB, "context_length": CONTEXT, "model_path": str(directory)}
    announced["routing"] = Routing(layers=2, top_k=2, experts=8)
    async with serving(client, sampler, "sampler-0", **announced):
        gateway = Gateway(
            "gateway-0",
            client,
            KeyRing(directory / "keys", KeyStore(client)),
            connect("", data),
            data,
            limits=Limits(),
        )
        await gateway.start()
        http = HttpServer(gateway.application, "127.0.0.1", 0)
        http.start()
        try:
            yield Talking(f"http://127.0.0.1:{http.port}", gateway, sampler)
        finally:
            sampler.gate.set()
            sampler.half.set()
            gateway.application.drain()
            await http.drain()
            await gateway.stop()
    await client.aclose()


__all__ = ["ALICE", "BASE", "BOB", "CONTEXT", "END", "Says", "Talking", "TalkingSampler", "talking"]
