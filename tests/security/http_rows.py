"""The routes of HTTP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from services.common.contract import ids
from tests.security.matrix import Kind, Row, World
from tests.unit.gateway.edge.http.batches import PROTO, batch
from tests.unit.gateway.edges import BASE

_RUN = "training_runs/{training_run_id}"
_CHECKPOINT = f"{_RUN}/checkpoints/{{kind}}/{{name}}"
_OAI, _ANTHROPIC = "/oai/api/v1/", "/anthropic/api/v1/"


def row(
    method: str,
    kind: Kind,
    body: Callable[[World], Any] | None = None,
    path: Callable[[World], str] | None = None,
    headers: dict[str, str] | None = None,
    **more: Any,
) -> Row:
    """A route, asked at its own path unless it has another, with JSON, or bytes of other kinds."""

    def ask(world: World) -> tuple[str, Any, dict[str, str]]:
        at = path(world) if path is not None else method.partition(" ")[2]
        return at, None if body is None else body(world), headers or {}

    return Row(method, kind, ask, **more)


def checkpoint(path: str, below: str = "") -> str:
    model, name = ids.parse_tinker_path(path)
    return f"training_runs/{model}/checkpoints/{name}{below}"


def sample(world: World) -> dict[str, Any]:
    return {
        "sampling_session_id": world.sampling,
        "seq_id": world.number,
        "prompt": {"chunks": [{"tokens": [1], "type": "encoded_text"}]},
        "sampling_params": {"max_tokens": 4},
    }


def question(world: World) -> dict[str, Any]:
    return {"model": world.sampler, "max_tokens": 4, "messages": [{"role": "user", "content": "a"}]}


ROWS = [
    row("POST client/config", "none", lambda w: {"sdk_version": "0.38.0"}, reads=True),
    row("POST client/dynamic_config", "none", lambda w: {"sdk_version": "0.38.0"}, reads=True),
    row("POST auth/token", "none", lambda w: {}, reads=True),
    row("GET auth/apikey/me", "none", reads=True),
    # Nobody may: keys are the operator's.
    row("DELETE auth/apikey/me", "none", reads=True, through="403"),
    row("POST create_session", "none", lambda w: {"tags": [], "sdk_version": "0.38.0"}),
    row("POST session_heartbeat", "owned", lambda w: {"session_id": w.session}),
    row(
        "POST sessions/{session_id}/finish",
        "owned",
        lambda w: {"reason": {"type": "success"}},
        lambda w: f"sessions/{w.session}/finish",
        fresh=True,
    ),
    row("POST telemetry", "none", lambda w: {}, reads=True),
    row("GET get_server_capabilities", "none", reads=True),
    # No sampler runs here that could be asked for the files.
    row(
        "GET tokenizers/{base_model:path}",
        "none",
        path=lambda w: f"tokenizers/{BASE}",
        reads=True,
        through="429",
    ),
    row(
        "POST create_model",
        "owned",
        lambda w: {
            "session_id": w.session,
            "model_seq_id": w.number,
            "base_model": BASE,
            "lora_config": {"rank": 4},
        },
    ),
    row("POST get_info", "owned", lambda w: {"model_id": w.model}, reads=True),
    row("POST forward_backward", "owned", lambda w: batch(w.model, w.number, [1]), headers=PROTO),
    # Its JSON is refused whatever it says; whose model it is comes first.
    row(
        "POST forward",
        "owned",
        lambda w: {"model_id": w.model, "seq_id": w.number, "forward_input": {}},
    ),
    row(
        "POST optim_step",
        "owned",
        lambda w: {"model_id": w.model, "seq_id": w.number, "adam_params": {}},
    ),
    row("POST save_weights", "owned", lambda w: {"model_id": w.model, "seq_id": w.number, "path": "n"}),
    row(
        "POST load_weights",
        "owned",
        lambda w: {"model_id": w.model, "seq_id": w.number, "path": w.weights, "optimizer": False},
    ),
    row(
        "POST save_weights_for_sampler",
        "owned",
        lambda w: {"model_id": w.model, "seq_id": w.number, "path": "n"},
    ),
    row("POST weights_info", "readable", lambda w: {"tinker_path": w.weights}, reads=True),
    row(
        "POST save_weights_external",
        "owned",
        lambda w: {"model_id": w.model, "seq_id": w.number, "path": "n"},
    ),
    row("POST copy_weights", "readable", lambda w: {"source_path": w.weights, "destination_project_id": "p"}),
    row("POST unload_model", "owned", lambda w: {"model_id": w.model}, fresh=True),
    row("GET training_runs", "none", reads=True),
    row(
        f"GET {_RUN}",
        "readable",
        path=lambda w: f"training_runs/{w.model}?access_scope=accessible",
        reads=True,
    ),
    row(
        f"GET {_RUN}/checkpoints",
        "readable",
        path=lambda w: f"training_runs/{w.model}/checkpoints",
        reads=True,
    ),
    row(
        f"GET {_CHECKPOINT}/external_weights_urls",
        "readable",
        path=lambda w: checkpoint(w.export, "/external_weights_urls"),
        reads=True,
    ),
    row(f"DELETE {_CHECKPOINT}", "changed", path=lambda w: checkpoint(w.weights), fresh=True),
    row(
        f"POST {_CHECKPOINT}/publish",
        "changed",
        path=lambda w: checkpoint(w.weights, "/publish"),
        fresh=True,
    ),
    row(f"DELETE {_CHECKPOINT}/publish", "changed", path=lambda w: checkpoint(w.weights, "/publish")),
    row(
        f"PUT {_CHECKPOINT}/ttl",
        "changed",
        lambda w: {"ttl_seconds": 7200},
        lambda w: checkpoint(w.weights, "/ttl"),
        fresh=True,
    ),
    row("GET checkpoints", "none", reads=True),
    row("GET sessions", "none", reads=True),
    row("POST sessions/search", "none", lambda w: {}, reads=True),
    row("GET sessions/{session_id}", "owned", path=lambda w: f"sessions/{w.session}", reads=True),
    row(
        "PUT sessions/{session_id}/project",
        "owned",
        lambda w: {"project_id": "p"},
        lambda w: f"sessions/{w.session}/project",
    ),
    row(
        "GET sessions/{session_id}/trace_export",
        "owned",
        path=lambda w: f"sessions/{w.session}/trace_export",
        reads=True,
    ),
    row("GET audit", "none", reads=True),
    row(
        "GET billing/usage/events",
        "none",
        path=lambda w: (
            "billing/usage/events?starting_on=2026-01-01T00:00:00Z&ending_before=2026-01-02T00:00:00Z"
        ),
        reads=True,
    ),
    row("GET billing/usage/checkpoints/current", "none", reads=True),
    row(
        "POST create_sampling_session",
        "readable",
        lambda w: {
            "session_id": w.session,
            "sampling_session_seq_id": w.number,
            "model_path": w.sampler,
        },
        in_own_session=True,
    ),
    row("GET samplers/{sampling_session_id}", "owned", path=lambda w: f"samplers/{w.sampling}", reads=True),
    row("POST asample", "owned", sample),
    row("POST retrieve_future", "owned", lambda w: {"request_id": f"{w.model}:0"}),
    row(
        "POST retrieve_futures",
        "owned",
        lambda w: {"target": {"sampling_session_id": w.sampling}, "timeout": 0},
    ),
    row("POST cancel_future", "owned", lambda w: {"request_id": w.request}, fresh=True),
    row("GET models", "none", reads=True, before=_OAI),
    row(
        "GET models/{model:path}",
        "readable",
        path=lambda w: f"models/{w.sampler}",
        reads=True,
        before=_OAI,
    ),
    # No sampler runs here that could answer; whose checkpoint it is comes first.
    row(
        "POST completions",
        "readable",
        lambda w: {"model": w.sampler, "prompt": "a"},
        before=_OAI,
        through="429",
    ),
    row("POST chat/completions", "readable", question, before=_OAI, through="429"),
    row("POST messages", "readable", question, before=_ANTHROPIC, through="429"),
    row(
        "POST messages/count_tokens",
        "readable",
        lambda w: {"model": w.sampler, "messages": [{"role": "user", "content": "a"}]},
        reads=True,
        before=_ANTHROPIC,
        through="429",
    ),
]
