"""A sequence on its way through vLLM's front end.

Invariant: what vLLM was asked for and nobody waits for any more is aborted in the engine, whatever ended the
wait.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar, cast

from vllm import SamplingParams
from vllm.envs import enable_envs_cache
from vllm.exceptions import VLLMClientError
from vllm.inputs import TokensInput
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.engine.output_processor import RequestOutputCollector

from services.common.process import failpoints
from services.common.process.tasks import cancel_all
from services.sampler.engine.calls.text import of_sampled_alone
from services.sampler.engine.logprobs.front import Processor

T = TypeVar("T")

_AT_ONCE = 8
_TASKS = ("generate",)
"""What every model of a sampler does."""


def spare(llm: AsyncLLM) -> None:
    """Spares a front end what it would do for every request and is the same each time: to read the
    environment, and to ask the tokenizer what ends a text."""
    enable_envs_cache()
    renderer: Any = llm.renderer
    renderer.get_eos_token_id = functools.cache(renderer.get_eos_token_id)


async def output(
    llm: AsyncLLM,
    name: str,
    prompt: TokensInput,
    params: SamplingParams,
    adapter: LoRARequest | None,
    take: Callable[[RequestOutput, int], None],
) -> RequestOutput:
    """What vLLM makes of a sequence. Cancelling the caller aborts it. As AsyncLLM.generate, which makes a
    generator of each.

    Args:
        take: is given every output as it comes, and how many tokens came before it. Of a stream each has what
            is new.

    Raises:
        VLLMClientError: vLLM refused it.
        EngineDeadError: the engine died.
        EngineGenerateError: something else failed in vLLM.
    """
    try:
        collector = await _added(llm, name, prompt, params, adapter)
        await failpoints.reach("sampler.mid_generation")
        whole: RequestOutput | None = None
        while whole is None or not whole.finished:
            new = cast(RequestOutput, collector.get_nowait() or await collector.get())
            take(new, 0 if whole is None else len(whole.outputs[0].token_ids))
            if whole is None:
                whole = new
            else:
                whole.add(new, aggregate=True)
        return whole
    except (EngineDeadError, VLLMClientError):
        raise
    except BaseException as error:
        await llm.abort(name)
        if isinstance(error, ValueError):
            # What is wrong in vLLM is no fault of the request's.
            raise EngineGenerateError from error
        raise


async def _added(
    llm: AsyncLLM, name: str, prompt: TokensInput, params: SamplingParams, adapter: LoRARequest | None
) -> RequestOutputCollector:
    """As AsyncLLM.add_request, for the one kind of request that there is here: a single sequence, of tokens,
    with a name of its own, to which vLLM adds no random characters."""
    if llm.errored:
        raise EngineDeadError
    llm._run_output_handler()
    request = llm.input_processor.process_inputs(name, prompt, params, _TASKS, lora_request=adapter)
    request.external_req_id = name
    collector = RequestOutputCollector(params.output_kind, name)
    llm.output_processor.add_request(request, None, queue=collector)
    # Stop strings need the text. vLLM would make that of every token with a log-probability besides.
    state: Any = llm.output_processor.request_states[name]
    state.logprobs_processor = Processor.of(state.logprobs_processor)
    of_sampled_alone(state.detokenizer, prompt["prompt_token_ids"])
    await llm.engine_core.add_request_async(request)
    return collector


async def together(calls: Sequence[Coroutine[None, None, T]], name: str) -> list[T]:
    """What each call comes to. When one fails or the caller is cancelled, the others are cancelled.

    Of many a few begin in each turn of the loop: one on its way into vLLM takes up to a millisecond of it.

    Args:
        name: of their tasks; one call by itself needs none.
    """
    if len(calls) == 1:
        return [await calls[0]]
    tasks: list[asyncio.Task[T]] = []
    try:
        for call in calls:
            tasks.append(asyncio.create_task(call, name=f"{name}-{len(tasks)}"))
            if len(tasks) % _AT_ONCE == 0:
                await asyncio.sleep(0)
        return await asyncio.gather(*tasks)
    except BaseException:
        for call in calls[len(tasks) :]:
            call.close()
        await cancel_all(tasks)
        raise
