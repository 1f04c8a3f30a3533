"""The routes of Anthropic's API, below each of the paths that it is served at."""

from __future__ import annotations

from collections.abc import AsyncIterator

from starlette.responses import Response
from starlette.routing import Route

from services.gateway.application import Application
from services.gateway.edge.anthropic import answers, questions, requests
from services.gateway.edge.http.codec import messages as messages_in
from services.gateway.edge.http.routes import Call, Handler, reply
from services.gateway.edge.inference.chat import Conversation, Reply, prompt_of, prompted
from services.gateway.edge.inference.endpoint import routes_of, streamed, typed
from services.gateway.edge.inference.unserved import refuse_unserved
from services.gateway.inference.inference import Model
from services.gateway.inference.question import Done, New, Question, parse_model

PATHS = ("/anthropic/api/v1", "/v1")


async def messages(call: Call) -> Response:
    """One message, whole or in a stream."""
    call.app.sampling.check_room(call.owner)
    name, model, question, found = await _asked(call)
    if question.stream:
        (prompt,) = question.prompts
        return await streamed(
            call.app.inference.ask(call.owner, model, question),
            lambda parts: _streamed(call, name, len(prompt), found, parts),
        )
    return await call.while_there(_whole(call, name, model, question, found))


async def _asked(call: Call) -> tuple[str, Model, Question, Reply]:
    """What a body asks, and what is to become its answer. The body's memory counts, and is held, only until
    then."""
    async with call.body() as data:
        body, conversation = await call.computed(_read, data)
        model = await call.app.inference.model(call.owner, parse_model(body.model))
        prompt, limit = await call.computed(prompted, model.tokenizer, conversation)
        question = questions.question(body, prompt, limit)
        return body.model, model, question, _reply(model, conversation, question)


def _read(data: bytes) -> tuple[requests.Message, Conversation]:
    body = messages_in.parse(requests.Message, data)
    refuse_unserved(body, requests.MESSAGE_UNSERVED)
    return body, questions.conversation(body)


def _counted(data: bytes) -> tuple[requests.Count, Conversation]:
    body = messages_in.parse(requests.Count, data)
    refuse_unserved(body, requests.COUNT_UNSERVED)
    return body, questions.conversation(body)


async def count_tokens(call: Call) -> Response:
    """The tokens that a message's prompt has."""
    call.app.sampling.check_room(call.owner)
    async with call.body() as data:
        body, conversation = await call.computed(_counted, data)
        model = await call.app.inference.model(call.owner, parse_model(body.model))
        return reply({"input_tokens": len(await call.computed(prompt_of, model.tokenizer, conversation))})


def _message(model: str, found: Reply, done: Done) -> Response:
    """A whole message. Takes time in proportion to it."""
    (sequence,) = done.sequences
    content = answers.blocks(found.finish(sequence.tokens, sequence.stopped))
    usage = answers.usage(done, found.count)
    reason = answers.stop_reason(found, sequence.stopped)
    return reply(answers.message(model, content, usage, reason, found.stop))


def _reply(model: Model, conversation: Conversation, question: Question) -> Reply:
    return Reply(model.tokenizer, question.stop, calls=bool(conversation.functions))


async def _whole(call: Call, name: str, model: Model, question: Question, found: Reply) -> Response:
    async with call.app.inference.ask(call.owner, model, question) as parts:
        (done,) = [part async for part in parts if isinstance(part, Done)]
        # The memory of what was told is held until nothing but the response is left of it.
        return await call.computed(_message, name, found, done)


async def _streamed(
    call: Call, model: str, prompt_tokens: int, found: Reply, parts: AsyncIterator[New | Done]
) -> AsyncIterator[bytes]:
    begun = {"input_tokens": prompt_tokens, "output_tokens": 0}
    content = answers.Blocks()
    try:
        head = answers.message(model, [], begun, None, None)
        yield answers.named({"type": "message_start", "message": head})
        async for part in parts:
            if isinstance(part, New):
                for frame in content.events(found.push(part.tokens)):
                    yield frame
                continue
            (sequence,) = part.sequences
            for frame in content.events(found.finish(sequence.tokens, sequence.stopped)):
                yield frame
            for frame in content.close():
                yield frame
            ended = {
                "stop_reason": answers.stop_reason(found, sequence.stopped),
                "stop_sequence": found.stop,
            }
            usage = answers.usage(part, found.count)
            yield answers.named({"type": "message_delta", "delta": ended, "usage": usage})
        yield answers.named({"type": "message_stop"})
    except Exception as error:
        yield answers.named(answers.error(typed(error, call.request))[1])


TABLE: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "messages", messages),
    ("POST", "messages/count_tokens", count_tokens),
)
"""Method, path, handler."""


def routes(application: Application) -> list[Route]:
    return routes_of(application, PATHS, TABLE, answers.error)
