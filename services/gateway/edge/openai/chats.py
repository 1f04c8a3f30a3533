"""POST chat/completions: conversations gone on with, whole or in a stream."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from starlette.responses import Response

from services.gateway.edge.http.codec import messages
from services.gateway.edge.http.routes import Call, reply
from services.gateway.edge.inference.chat import Conversation, Reply, Said, prompted
from services.gateway.edge.inference.endpoint import event, streamed, typed
from services.gateway.edge.openai import answers, questions, requests
from services.gateway.inference.inference import Model
from services.gateway.inference.question import Done, New, Question, parse_model
from services.gateway.text.generated import Token
from services.gateway.text.tool_calls import Call as ToolCall


@dataclass(frozen=True)
class _Chat:
    """One request under way: what its answer needs, and nothing else of its body."""

    call: Call
    name: str
    model: Model
    question: Question
    calls: bool
    scored: bool
    counted: bool

    def reply(self) -> Reply:
        return Reply(self.model.tokenizer, self.question.stop, self.calls)

    def logprobs(self, tokens: Iterable[Token]) -> dict[str, Any] | None:
        return answers.chat_logprobs(self.model.tokenizer, tokens) if self.scored else None


async def chat_completions(call: Call) -> Response:
    """One chat request."""
    call.app.sampling.check_room(call.owner)
    chat = await _asked(call)
    if chat.question.stream:
        head = answers.Head.new("chatcmpl", "chat.completion.chunk", chat.name, chat.model.weights)
        return await streamed(
            call.app.inference.ask(call.owner, chat.model, chat.question),
            lambda parts: _streamed(chat, head, parts),
        )
    head = answers.Head.new("chatcmpl", "chat.completion", chat.name, chat.model.weights)
    return await call.while_there(_whole(chat, head))


async def _asked(call: Call) -> _Chat:
    """What a body asks. The body's memory counts, and is held, only until the prompt is made of it."""
    async with call.body() as data:
        body, conversation = await call.computed(_read, data)
        model = await call.app.inference.model(call.owner, parse_model(body.model))
        prompt, limit = await call.computed(prompted, model.tokenizer, conversation)
        question = replace(questions.chat(body, prompt), constraint=limit)
        counted = body.stream_options is not None and bool(body.stream_options.include_usage)
        return _Chat(
            call, body.model, model, question, bool(conversation.functions), bool(body.logprobs), counted
        )


def _read(data: bytes) -> tuple[requests.Chat, Conversation]:
    body = messages.parse(requests.Chat, data)
    return body, questions.conversation(body)


async def _whole(chat: _Chat, head: answers.Head) -> Response:
    async with chat.call.app.inference.ask(chat.call.owner, chat.model, chat.question) as parts:
        (done,) = [part async for part in parts if isinstance(part, Done)]
        # The memory of what was told is held until nothing but the response is left of it.
        return await chat.call.computed(lambda: reply(head.of(_choices(chat, done), answers.usage([done]))))


def _choices(chat: _Chat, done: Done) -> list[dict[str, Any]]:
    choices = []
    for index, sequence in enumerate(done.sequences):
        found = chat.reply()
        texts: list[str] = []
        calls: list[dict[str, Any]] = []
        tokens = _tokens(found.finish(sequence.tokens, sequence.stopped), texts, calls)
        logprobs = chat.logprobs(tokens)
        # Text and calls are there once all tokens were gone over.
        deque(tokens, 0)
        text = "".join(texts)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message |= {"content": (text.strip() and text) or None, "tool_calls": calls}
        choices.append(
            {
                "index": index,
                "message": message,
                "logprobs": logprobs,
                "finish_reason": answers.finish_reason(sequence.stopped, found.calls),
            }
        )
    return choices


def _tokens(
    parts: Iterable[Said | ToolCall], texts: list[str], calls: list[dict[str, Any]]
) -> Iterator[Token]:
    """The tokens of what was said, whose text it adds to `texts`; and to `calls` what is called."""
    for part in parts:
        if isinstance(part, ToolCall):
            calls.append(answers.tool_call(part))
        else:
            texts.append(part.text)
            yield from part.tokens


async def _streamed(
    chat: _Chat, head: answers.Head, parts: AsyncIterator[New | Done]
) -> AsyncIterator[bytes]:
    replies = [chat.reply() for _ in range(chat.question.num_samples)]
    try:
        for index in range(len(replies)):
            yield event(head.of([_chunk(index, {"role": "assistant", "content": ""})]))
        async for part in parts:
            if isinstance(part, New):
                found = replies[part.sequence]
                for delta in _deltas(chat, part.sequence, found, found.push(part.tokens)):
                    yield event(head.of([delta]))
                continue
            for index, sequence in enumerate(part.sequences):
                found = replies[index]
                rest = found.finish(sequence.tokens, sequence.stopped)
                for delta in _deltas(chat, index, found, rest):
                    yield event(head.of([delta]))
                reason = answers.finish_reason(sequence.stopped, found.calls)
                yield event(head.of([_chunk(index, {}, reason=reason)]))
            if chat.counted:
                yield event(head.of([], answers.usage([part])))
        yield b"data: [DONE]\n\n"
    except Exception as error:
        yield event(answers.error(typed(error, chat.call.request))[1])


def _deltas(
    chat: _Chat, index: int, found: Reply, parts: Iterable[Said | ToolCall]
) -> Iterable[dict[str, Any]]:
    for part in parts:
        if isinstance(part, ToolCall):
            called = {"index": found.calls - 1, **answers.tool_call(part)}
            yield _chunk(index, {"tool_calls": [called]})
        else:
            yield _chunk(index, {"content": part.text}, chat.logprobs(part.tokens) if part.tokens else None)


def _chunk(
    index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
