"""What is sent to vLLM's core, and in which order: an update of weights relies on it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from vllm import SamplingParams
from vllm.inputs import tokens_input
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import AsyncMPClient


class Socket:
    """Keeps what is sent at once; nobody ever answers."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def send_multipart(self, message: tuple[bytes, ...], copy: bool) -> asyncio.Future[None]:
        self.sent.append(message[1])
        return asyncio.get_running_loop().create_future()


def client(socket: Socket) -> Any:
    made: Any = AsyncMPClient.__new__(AsyncMPClient)
    made.input_socket, made.core_engine, made.client_index = socket, b"engine", 0
    made.utility_results = {}
    made.encoder = SimpleNamespace(encode=lambda _: (b"",))
    made.resources, made._finalizer = SimpleNamespace(engine_dead=False), SimpleNamespace(detach=lambda: None)
    return made


def front_end(core: Any) -> Any:
    made: Any = AsyncLLM.__new__(AsyncLLM)
    request = SimpleNamespace(request_id="sample-0", params=SamplingParams())
    made.engine_core, made.log_requests, made._supported_tasks = core, False, ("generate",)
    made.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(kv_sharing_fast_prefill=False))
    made.observability_config, made.model_config = None, SimpleNamespace(is_encoder_decoder=False)
    made.input_processor = SimpleNamespace(
        process_inputs=lambda *_, **__: request, assign_request_id=lambda _: None
    )
    made.output_processor = SimpleNamespace(has_request=lambda _: True, add_request=lambda *_: None)
    made._run_output_handler = lambda: None
    made.output_handler = None
    return made


async def test_requests_and_calls_are_sent_in_the_order_in_which_they_begin() -> None:
    socket = Socket()
    core = client(socket)
    llm = front_end(core)
    outputs = llm.generate(tokens_input(prompt_token_ids=[1]), SamplingParams(), "sample-0")
    begun = [anext(outputs).__await__(), core.call_utility_async("tinsmith_update").__await__()]
    for one in begun:
        # Up to where it waits first.
        one.send(None)
    assert socket.sent == [EngineCoreRequestType.ADD.value, EngineCoreRequestType.UTILITY.value]
    for one in begun:
        one.close()
