"""The routes of OpenAI's API, below each of the paths that it is served at."""

from __future__ import annotations

from starlette.responses import Response
from starlette.routing import Route

from services.gateway.application import Application
from services.gateway.edge.http.routes import Call, Handler, reply
from services.gateway.edge.inference.endpoint import routes_of
from services.gateway.edge.openai import answers
from services.gateway.edge.openai.chats import chat_completions
from services.gateway.edge.openai.completions import completions
from services.gateway.inference.question import parse_model

PATHS = ("/oai/api/v1", "/v1")


async def models(call: Call) -> Response:
    """The base models that can be sampled. Checkpoints are named by their path and not listed here."""
    served = [answers.model(base) for base in await call.app.base_models.served() if base.sampleable]
    return reply({"object": "list", "data": served})


async def model(call: Call) -> Response:
    """One model, also a checkpoint by its path."""
    name = call.request.path_params["model"]
    parsed = parse_model(name)
    weights = await call.app.sampling.resolve(call.owner, parsed.base_model, parsed.path)
    base = await call.app.base_models.get(weights.base_model)
    return reply({**answers.model(base), "id": name})


TABLE: tuple[tuple[str, str, Handler], ...] = (
    ("GET", "models", models),
    ("GET", "models/{model:path}", model),
    ("POST", "completions", completions),
    ("POST", "chat/completions", chat_completions),
)
"""Method, path, handler."""


def routes(application: Application) -> list[Route]:
    return routes_of(application, PATHS, TABLE, answers.error)
