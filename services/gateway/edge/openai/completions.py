"""POST completions: texts continued, whole or in a stream."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from starlette.responses import Response

from services.gateway.edge.http.codec import messages
from services.gateway.edge.http.routes import Call, reply
from services.gateway.edge.inference.chat import Reply, Said
from services.gateway.edge.inference.endpoint import event, streamed, typed
from services.gateway.edge.openai import answers, questions, requests
from services.gateway.inference.inference import Model
from services.gateway.inference.question import Done, New, Question, parse_model
from services.gateway.text.generated import Token
from services.gateway.text.tool_calls import Call as ToolCall


async def completions(call: Call) -> Response:
    """One completion request."""
    call.app.sampling.check_room(call.owner)
    asked = await _asked(call)
    head = answers.Head.new("cmpl", "text_completion", asked.name, asked.model.weights)
    if asked.question.stream:
        return await streamed(
            call.app.inference.ask(call.owner, asked.model, asked.question),
            lambda parts: _streamed(call, asked, head, parts),
        )
    return await call.while_there(_whole(call, asked, head))


@dataclass(frozen=True)
class _Asked:
    """What a body asks, and nothing else of it.

    Attributes:
        before: what the text of each prompt's answers begins with, when the prompt is to be echoed.
        logprobs: how many of the likeliest tokens are told of each; None = no log-probabilities.
        counted: a stream ends with the usage.
    """

    name: str
    model: Model
    question: Question
    before: Sequence[str] | None
    logprobs: int | None
    counted: bool


async def _asked(call: Call) -> _Asked:
    """The body's memory counts, and is held, only until it is read."""
    async with call.body() as data:
        body = await call.computed(messages.parse, requests.Completion, data)
        model = await call.app.inference.model(call.owner, parse_model(body.model))
        question = await call.computed(questions.completion, body, model.tokenizer)
        before = await call.computed(_echoed, body, model) if body.echo else None
        counted = body.stream_options is not None and bool(body.stream_options.include_usage)
        return _Asked(body.model, model, question, before, body.logprobs, counted)


def _echoed(body: requests.Completion, model: Model) -> list[str]:
    prompts = questions.prompts_of(body)
    return [prompt if isinstance(prompt, str) else model.tokenizer.text(prompt) for prompt in prompts]


async def _whole(call: Call, asked: _Asked, head: answers.Head) -> Response:
    async with call.app.inference.ask(call.owner, asked.model, asked.question) as parts:
        found = [part async for part in parts if isinstance(part, Done)]
        done = sorted(found, key=lambda part: part.prompt)
        # The memory of what was told is held until nothing but the response is left of it.
        return await call.computed(lambda: reply(head.of(_choices(asked, done), answers.usage(done))))


def _choices(asked: _Asked, done: Sequence[Done]) -> list[dict[str, object]]:
    made: list[dict[str, object]] = []
    for part in done:
        before, scored = ("", ()) if asked.before is None else (asked.before[part.prompt], part.scored)
        for sequence in part.sequences:
            found = Reply(asked.model.tokenizer, asked.question.stop)
            texts = [before]
            tokens = chain(scored, _tokens(found.finish(sequence.tokens, sequence.stopped), texts))
            # The text is there once all tokens were gone over.
            choice = _choice(asked, len(made), "", tokens, 0, sequence.stopped)
            deque(tokens, 0)
            made.append({**choice, "text": "".join(texts)})
    return made


def _tokens(events: Iterable[Said | ToolCall], texts: list[str]) -> Iterator[Token]:
    """The tokens of what was said, whose text it adds to `texts`."""
    for one in events:
        if isinstance(one, Said):
            texts.append(one.text)
            yield from one.tokens


def _choice(
    asked: _Asked,
    index: int,
    text: str,
    tokens: Iterable[Token],
    start: int,
    stopped: bool | None,
) -> dict[str, object]:
    """`stopped`: None = it goes on."""
    logprobs = None
    if asked.logprobs is not None:
        logprobs = answers.completion_logprobs(asked.model.tokenizer, tokens, start, asked.logprobs)
    reason = None if stopped is None else answers.finish_reason(stopped)
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


async def _streamed(
    call: Call, asked: _Asked, head: answers.Head, parts: AsyncIterator[New | Done]
) -> AsyncIterator[bytes]:
    question = asked.question
    replies = [
        Reply(asked.model.tokenizer, question.stop)
        for _ in range(len(question.prompts) * question.num_samples)
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
                    yield event(head.of([_choice(asked, index, text, tokens, starts[index], stopped)]))
                    starts[index] += len(text)
        if asked.counted:
            yield event(head.of([], answers.usage(done)))
        yield b"data: [DONE]\n\n"
    except Exception as error:
        yield event(answers.error(typed(error, call.request))[1])
