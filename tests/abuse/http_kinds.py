"""Hostile requests over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx

from tests.abuse import batch_kinds, values
from tests.abuse.attack import Attempt, End, Outcome
from tests.abuse.target import Target
from tests.cluster.conftest import BASE_MODEL

MIB = 1024 * 1024
_POLL_S = 150.0
"""A poll for a result that is not there yet is held for 40 s."""


def bodies(target: Target) -> dict[str, dict[str, Any]]:
    """A valid JSON body for every POST route that takes one."""
    model, session, sampler = target.model_id, target.session_id, target.sampling_session_id
    numbered = {"model_id": model, "seq_id": 900_000}
    path = f"tinker://{model}/weights/a"
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
    return {
        "client/config": {"sdk_version": "0.38.0"},
        "create_session": {"tags": ["a"], "user_metadata": {"a": "b"}, "sdk_version": "0.38.0"},
        "session_heartbeat": {"session_id": session},
        f"sessions/{session}/project": {"project_id": "p"},
        "sessions/x/finish": {"reason": {"type": "success"}},
        "telemetry": {"events": [], "platform": "a", "sdk_version": "0", "session_id": session},
        "create_model": {
            **{"session_id": session, "model_seq_id": 7, "base_model": "nobody/nothing"},
            "lora_config": {"rank": 8, "seed": 1},
        },
        "get_info": {"model_id": model},
        "optim_step": {**numbered, "adam_params": {"learning_rate": 1e-4}},
        "save_weights": {**numbered, "path": "a/b", "ttl_seconds": 5},
        "load_weights": {**numbered, "path": path, "optimizer": True},
        "save_weights_for_sampler": {**numbered, "path": "../a", "kind": "inflight"},
        "save_weights_external": {**numbered, "path": "..", "age_encryption_recipients": ["age1x"]},
        "copy_weights": {"path": path},
        "weights_info": {"tinker_path": path},
        "unload_model": {"model_id": "nobody:train:0"},
        "create_sampling_session": {
            **{"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE_MODEL},
        },
        "asample": {
            **{"sampling_session_id": sampler, "seq_id": 900_000, "num_samples": 0, "prompt": prompt},
            "sampling_params": {"max_tokens": 1, "temperature": 1.0, "stop": ["a"]},
            "target_prompt_logprobs": {"data": [1, 2], "dtype": "int64", "shape": [2, 1]},
        },
        "retrieve_future": {"request_id": f"{model}:777777"},
        "retrieve_futures": {"target": {"sampling_session_id": sampler}, "prev_cursor": 0, "timeout": 0.1},
        "cancel_future": {"request_id": f"{sampler}:777777"},
        "sessions/search": {"limit": 5, "display_name": "a", "statuses": [{"type": "active"}]},
    }


GETS = [
    *("get_server_capabilities", "training_runs", "checkpoints", "sessions", "audit"),
    *("billing/usage/events", "billing/usage/checkpoints/current"),
]


class Http:
    """Makes attempts on the HTTP port."""

    def __init__(self, target: Target, client: httpx.AsyncClient, seed: int) -> None:
        self._target = target
        self._client = client
        self._seed = seed

    def attempts(self, each: int) -> Iterator[Attempt]:
        """`each` attempts of every kind that is made of random values, and the rest."""
        yield from self._json(each)
        yield from self._malformed_json(each)
        yield from self._paths(each)
        yield from self._batches(each)
        yield from self._strangers(each)

    def _attempt(self, kind: str, method: str, path: str, seconds: float = 90.0, **how: Any) -> Attempt:
        return Attempt(f"HTTP {kind}", partial(self._send, method, path, **how), seconds)

    async def _send(self, method: str, path: str, **how: Any) -> Outcome:
        headers = {"x-api-key": self._target.key, **how.pop("headers", {})}
        try:
            answer = await self._client.request(method, f"/api/v1/{path}", headers=headers, **how)
        except (httpx.InvalidURL, UnicodeEncodeError, ValueError):
            return Outcome(End.REFUSED, "httpx does not send this")
        except httpx.TransportError as error:
            return Outcome(End.CLOSED, repr(error))
        if answer.status_code >= 500:
            return Outcome(End.FAULT, f"{answer.status_code} {answer.text}")
        return Outcome(End.REFUSED if answer.status_code >= 400 else End.ANSWERED)

    def _json(self, each: int) -> Iterator[Attempt]:
        for route, valid in bodies(self._target).items():
            drawn = values.drawn(values.objects(valid, self._target.known), each, self._seed)
            name = route.replace(self._target.session_id, "x")
            for body in drawn:
                raw = json.dumps(body).encode("utf-8", "surrogatepass")
                yield self._attempt(f"{name}: fields", "POST", route, _POLL_S, content=raw)

    def _malformed_json(self, each: int) -> Iterator[Attempt]:
        valid = bodies(self._target)
        routes = list(valid)
        for place in range(each):
            route = routes[place % len(routes)]
            raw = json.dumps(valid[route]).encode()
            body = values.drawn(values.damaged(raw), 1, self._seed + place)[0]
            yield self._attempt("JSON: bytes", "POST", route, _POLL_S, content=body)
        numbered = json.dumps({"model_id": self._target.model_id, "seq_id": 900_001})[:-1].encode()
        for route in routes:
            for depth in (100, 500, 5_000, 100_000):
                for body in values.nested(depth):
                    yield self._attempt("JSON: nested", "POST", route, content=body)
            odd = {
                "JSON: a million numbers": b'{"prompt":[' + b"300," * 1_000_000 + b"1]}",
                "JSON: a key of 1 MB": b'{"' + b"k" * MIB + b'":1}',
                "JSON: 100,000 keys": b"{" + b",".join(b'"%d":1' % n for n in range(100_000)) + b"}",
                "JSON: not UTF-8": b'{"model_id":"\xff\xfe"}',
                "JSON: a number of 100,000 digits": b'{"seq_id":' + b"9" * 100_000 + b"}",
                "JSON: not a number": numbered + b',"adam_params":{"learning_rate":NaN}}',
                "JSON: empty body": b"",
                "JSON: one key twice": numbered + b',"seq_id":1,"seq_id":2}',
            }
            for kind, body in odd.items():
                yield self._attempt(kind, "POST", route, content=body)
        yield self._attempt("JSON: 17 MB", "POST", "asample", content=b" " * (17 * MIB))

    def _paths(self, each: int) -> Iterator[Attempt]:
        known = values.texts(self._target.known)
        for place, text in enumerate(values.drawn(known, each, self._seed)):
            name = GETS[place % len(GETS)]
            yield self._attempt(
                "queries", "GET", name, params={"limit": text, "offset": text, text[:50]: text}
            )
            for path in (f"training_runs/{text}", f"sessions/{text}", f"samplers/{text}/{text}"):
                yield self._attempt("paths", "GET", path)
            checkpoint = f"training_runs/{text}/checkpoints/weights/{text}"
            yield self._attempt("checkpoints: paths", "DELETE", checkpoint)
            yield self._attempt("checkpoints: lifetimes", "PUT", f"{checkpoint}/ttl", content=text.encode())
            signed = f"downloads/{text}/external_weights/{text}/1/{text}"
            yield self._attempt("downloads: signatures", "GET", signed, params={"e": text, "s": text})
        for method in ("PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "HEAD", "BREW"):
            for route in bodies(self._target):
                yield self._attempt("methods", method, route)

    def _batches(self, each: int) -> Iterator[Attempt]:
        for batch in batch_kinds.batches(self._target, each, self._seed):
            yield self._attempt(
                f"batches: {batch.kind}",
                "POST",
                "forward_backward",
                content=batch.body,
                headers=batch.headers,
            )

    def _strangers(self, each: int) -> Iterator[Attempt]:
        valid = bodies(self._target)
        routes = list(valid)
        keys = ["", "tml-wrong", "x" * 7_000, "a" * 60_000, "tml-\x7f", self._target.key + "x", "Bearer a"]
        for place in range(each):
            route = routes[place % len(routes)]
            body = json.dumps(valid[route]).encode()
            headers = {"x-api-key": keys[place % len(keys)]}
            yield self._attempt("wrong keys", "POST", route, content=body, headers=headers)
        for name in self._target.others:
            for route, body_of in valid.items():
                stolen = json.dumps(body_of).replace(self._target.model_id, name)
                stolen = stolen.replace(self._target.sampling_session_id, name)
                stolen = stolen.replace(self._target.session_id, name)
                yield self._attempt("somebody else's", "POST", route, _POLL_S, content=stolen.encode())
