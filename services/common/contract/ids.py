"""Grammar of identifiers and tinker:// paths.

Invariant: an id that parses here is safe as a Redis key and as one path component: no "/", no
"..", bounded length. Ids are deterministic functions of what the client numbers, so a repeated
request names the same object, and a request has one id.
"""

from __future__ import annotations

import re
import uuid
from functools import lru_cache

from services.common.contract.errors import InvalidRequest

CLONE_SEQ_IDS = 10**9
"""Each copy of a sampling client numbers its requests in a block of its own of this size."""

_REMEMBERED = 4096

_SESSION = r"[0-9A-Za-z][0-9A-Za-z_-]{0,63}"
_NAME = r"[0-9A-Za-z_][0-9A-Za-z._=+,@~-]{0,199}"
_SESSION_ID = re.compile(_SESSION)
_MODEL_ID = re.compile(rf"({_SESSION}):train:([0-9]{{1,9}})")
_SAMPLING_SESSION_ID = re.compile(rf"({_SESSION}):sample:([0-9]{{1,9}})")
_REQUEST_ID = re.compile(rf"({_SESSION}:(?:train|sample):[0-9]{{1,9}}):(0|[1-9][0-9]{{0,18}})")
_CHECKPOINT_ID = re.compile(rf"(weights|sampler_weights|external_weights)/({_NAME})")
_TINKER_PATH = re.compile(
    rf"tinker://({_SESSION}:train:[0-9]{{1,9}})/((?:weights|sampler_weights|external_weights)/{_NAME})"
)


def new_session_id() -> str:
    """A random session id."""
    return str(uuid.uuid4())


def model_id(session_id: str, model_seq_id: int) -> str:
    """Id of the n-th model of a session; the SDK computes the same."""
    return f"{session_id}:train:{model_seq_id}"


def sampling_session_id(session_id: str, seq_id: int) -> str:
    """Id of the n-th sampling session of a session."""
    return f"{session_id}:sample:{seq_id}"


def request_id(object_id: str, seq_id: int) -> str:
    """Id of the request numbered `seq_id` of a model or sampling session."""
    return f"{object_id}:{seq_id}"


def is_session_id(text: str) -> bool:
    return _SESSION_ID.fullmatch(text) is not None


def is_model_id(text: str) -> bool:
    return _MODEL_ID.fullmatch(text) is not None


@lru_cache(_REMEMBERED)
def is_sampling_session_id(text: str) -> bool:
    return _SAMPLING_SESSION_ID.fullmatch(text) is not None


def session_of(object_id: str) -> str:
    """Session that a model or sampling session belongs to."""
    return object_id.split(":", 1)[0]


@lru_cache(_REMEMBERED)
def parse_request_id(text: str) -> tuple[str, int]:
    """(model id or sampling session id, seq_id) of a request id. One is taken apart by everybody who has a
    part in the request.

    Raises:
        InvalidRequest: the text is no request id.
    """
    match = _REQUEST_ID.fullmatch(text)
    if match is None:
        raise InvalidRequest(
            f"{text[:200]!r} is not a request id; pass one that this service returned", field="request_id"
        )
    return match[1], int(match[2])


def checkpoint_id(kind: str, name: str) -> str:
    """ "<kind>/<name>" with the name checked.

    Raises:
        InvalidRequest: the name has characters that a checkpoint name must not have.
    """
    text = f"{kind}/{name}"
    if _CHECKPOINT_ID.fullmatch(text) is None:
        raise InvalidRequest(
            f"{name[:200]!r} is not a checkpoint name: it is a part of paths and URLs, so use 1 to 200 "
            "letters, digits and characters of ._=+,@~-, and begin with a letter, a digit or '_'",
            field="name",
        )
    return text


def check_checkpoint_id(text: str) -> str:
    """The text itself when it is a checkpoint id ("weights/<name>").

    Raises:
        InvalidRequest: it is not.
    """
    if _CHECKPOINT_ID.fullmatch(text) is None:
        raise InvalidRequest(f"{text[:200]!r} is not a checkpoint id such as weights/<name>")
    return text


def tinker_path(model: str, checkpoint: str) -> str:
    """tinker://<model id>/<checkpoint id>."""
    return f"tinker://{model}/{checkpoint}"


def parse_tinker_path(path: str) -> tuple[str, str]:
    """(model id, checkpoint id) of a tinker:// path.

    Raises:
        InvalidRequest: the path has another form.
    """
    match = _TINKER_PATH.fullmatch(path)
    if match is None:
        raise InvalidRequest(
            f"{path[:200]!r} is not a checkpoint path: expected "
            "tinker://<training_run_id>/<weights|sampler_weights|external_weights>/<name>",
            field="path",
        )
    return match[1], match[2]
