"""POST completions: texts continued, whole or in a stream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack

from starlette.responses import Response

from services.common.process.pools import COMPUTE
from services.gateway.edge.http.routes import Call, reply
from services.gateway.edge.inference.chat import Reply, Said
from services.gateway.edge.inference.endpoint import EventStream, event, typed
from services.gateway.edge.openai import answers, questions, requests
from services.gateway.inference.inference import Model
from services.gateway.inference.question import Done, New, Question, parse_model
from services.gateway.text.generated import Token
from services.gateway.text.tool_calls import Call as ToolCall


async def completions(call: Call) -> Response:
    """One completion request."""
    call.app.sampling.check_room(call.owner)
    async with AsyncExitStack() as held:
        body = await call.json_held(requests.Completion, held)
        model = await call.app.inference.model(call.owner, parse_model(body.model))
        question = await COMPUTE.run(questions.completion, body, model.tokenizer)
        head = answers.Head.new("cmpl", "text_completion", body.model, model.weights)
        if question.stream:
            parts = await held.enter_async_context(call.app.inference.ask(call.owner, model, question))
            streamed = _streamed(call, body, model, question, head, parts)
            return EventStream(streamed, held.pop_all().aclose)
        done = await call.while_there(_done(call, model, question))
        return await COMPUTE.run(
            lambda: reply(head.of(_choices(body, model, question, done), answers.usage(done)))
        )


async def _done(call: Call, model: Model, question: Question) -> list[Done]:
    async with call.app.inference.ask(call.owner, model, question) as parts:
        found = [part async for part in parts if isinstance(part, Done)]
    return sorted(found, key=lambda part: part.prompt)


def _choices(
    body: requests.Completion, model: Model, question: Question, done: Sequence[Done]
) -> list[dict[str, object]]:
    prompts = questions.prompts_of(body)
    made: list[dict[str, object]] = []
    for part in done:
        prompt = prompts[part.prompt]
        before = "" if not body.echo else prompt if isinstance(prompt, str) else model.tokenizer.text(prompt)
        for sequence in part.sequences:
            found = Reply(model.tokenizer, question.stop)
            said = [one for one in found.finish(sequence.tokens, sequence.stopped) if isinstance(one, Said)]
            text = before + "".join(one.text for one in said)
            tokens = [*(part.scored if body.echo else ()), *(token for one in said for token in one.tokens)]
            made.append(_choice(body, model, len(made), text, tokens, 0, sequence.stopped))
    return made


def _choice(
    body: requests.Completion,
    model: Model,
    index: int,
    text: str,
    tokens: Sequence[Token],
    start: int,
    stopped: bool | None,
) -> dict[str, object]:
    """`stopped`: None = it goes on."""
    logprobs = None
    if body.logprobs is not None:
        logprobs = answers.completion_logprobs(model.tokenizer, tokens, start, body.logprobs)
    reason = None if stopped is None else answers.finish_reason(stopped)
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


async def _streamed(
    call: Call,
    body: requests.Completion,
    model: Model,
    question: Question,
    head: answers.Head,
    parts: AsyncIterator[New | Done],
) -> AsyncIterator[bytes]:
    replies = [
        Reply(model.tokenizer, question.stop) for _ in range(len(question.prompts) * question.num_samples)
    ]
    starts, done = [0] * len(replies), []
    try:
        async for part in parts:
            first = part.prompt * question.num_samples
            if isinstance(part, New):
                index = first + part.sequence
                updates: list[tuple[int, Iterable[Said | ToolCall], bool | None]]
                updates = [(index, replies[index].push(part.tokens), None)]
            else:
                done.append(part)
                updates = [
                    (first + i, replies[first + i].finish(one.tokens, one.stopped), one.stopped)
                    for i, one in enumerate(part.sequences)
                ]
            for index, events, stopped in updates:
                found = [one for one in events if isinstance(one, Said)]
                text = "".join(one.text for one in found)
                tokens = [token for one in found for token in one.tokens]
                if text or tokens or stopped is not None:
                    yield event(head.of([_choice(body, model, index, text, tokens, starts[index], stopped)]))
                    starts[index] += len(text)
        if body.stream_options is not None and body.stream_options.include_usage:
            yield event(head.of([], answers.usage(done)))
        yield b"data: [DONE]\n\n"
    except Exception as error:
        yield event(answers.error(typed(error, call.request))[1])
