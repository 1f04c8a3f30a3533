"""Every failure the services report, as typed exceptions.

Invariant: an error is mapped to HTTP and to gRPC from the class attributes below and nowhere
else, and its message, which is bounded, tells the reader what to change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from tinsmith.v1 import types_pb2

Category = Literal["user", "server"]

MESSAGE_CHARS = 2000
"""Longest message. It may quote what a client sent, and is stored with the result of a refused request."""


class TinsmithError(Exception):
    """Base of all reported errors.

    Attributes:
        category: "user" when the request must change, "server" when the service must.
        code: stable machine-readable reason; the class's own unless given.
        http_status: HTTP status of the error.
        grpc_status: name of the `grpc.StatusCode` of the error.
        retry_after: seconds after which the same request may succeed; 0 = it will not.
        field: the field of the request that is at fault, as the contract names it; empty = none.
        about: what a program may want to know of it, by name, such as the limit that was reached.
    """

    category: ClassVar[Category] = "server"
    default_code: ClassVar[str] = "internal"
    http_status: ClassVar[int] = 500
    grpc_status: ClassVar[str] = "INTERNAL"
    retry_after: ClassVar[int] = 0

    def __init__(
        self,
        message: str,
        code: str | None = None,
        *,
        field: str = "",
        about: Mapping[str, str] | None = None,
    ) -> None:
        if len(message) > MESSAGE_CHARS:
            message = message[: MESSAGE_CHARS - 3] + "..."
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        self.field = field
        self.about = dict(about or {})


class InvalidRequest(TinsmithError):
    category = "user"
    default_code = "invalid_request"
    http_status = 400
    grpc_status = "INVALID_ARGUMENT"


class Unauthenticated(TinsmithError):
    category = "user"
    default_code = "unauthenticated"
    http_status = 401
    grpc_status = "UNAUTHENTICATED"


class PermissionDenied(TinsmithError):
    category = "user"
    default_code = "permission_denied"
    http_status = 403
    grpc_status = "PERMISSION_DENIED"


class NotFound(TinsmithError):
    category = "user"
    default_code = "not_found"
    http_status = 404
    grpc_status = "NOT_FOUND"


class Conflict(TinsmithError):
    """A seq_id was used before with another payload."""

    category = "user"
    default_code = "conflict"
    http_status = 409
    grpc_status = "ALREADY_EXISTS"


class Gone(TinsmithError):
    category = "user"
    default_code = "gone"
    http_status = 410
    grpc_status = "NOT_FOUND"


class TooLarge(TinsmithError):
    category = "user"
    default_code = "too_large"
    http_status = 413
    grpc_status = "INVALID_ARGUMENT"


class HeadTooLarge(TooLarge):
    """The URL and the headers of an HTTP request are more than is taken."""

    default_code = "head_too_large"
    http_status = 431


class Overloaded(TinsmithError):
    """A bounded queue is full; the same request may succeed later."""

    default_code = "overloaded"
    http_status = 429
    grpc_status = "RESOURCE_EXHAUSTED"
    retry_after = 1


class LimitReached(Overloaded):
    """The API key has all that it may have of something; the message says of what, and names the flag."""

    default_code = "limit_reached"


class Cancelled(TinsmithError):
    """The client gave the request up, or went away itself."""

    category = "user"
    default_code = "cancelled"
    http_status = 400
    grpc_status = "CANCELLED"


class Internal(TinsmithError):
    pass


class Unavailable(TinsmithError):
    """The part that would do the work is not there (starting, draining, lost)."""

    default_code = "unavailable"
    http_status = 503
    grpc_status = "UNAVAILABLE"
    retry_after = 1


class Draining(Unavailable):
    """The part that would do the work ends in order. Nothing was wrong with it: another one does the work."""

    default_code = "draining"


class Starting(TinsmithError):
    """What the request needs to know first comes up when a model has loaded, which may take minutes.

    Over HTTP 429: after it the SDK repeats a sample without end, and what it repeats ten times lasts, with
    these pauses, for as long as a model loads.
    """

    default_code = "starting"
    http_status = 429
    grpc_status = "UNAVAILABLE"
    retry_after = 30


class DeadlineExceeded(TinsmithError):
    default_code = "deadline_exceeded"
    http_status = 504
    grpc_status = "DEADLINE_EXCEEDED"


class ModelNotResident(TinsmithError):
    """The trainer does not hold the model; restore it first."""

    default_code = "model_not_resident"
    http_status = 503
    grpc_status = "FAILED_PRECONDITION"


class ModelBusy(TinsmithError):
    """Operations of the model are not done; ask again when they are."""

    default_code = "model_busy"
    http_status = 503
    grpc_status = "FAILED_PRECONDITION"


class ModelOpen(TinsmithError):
    """The model may still be used."""

    default_code = "model_open"
    http_status = 503
    grpc_status = "FAILED_PRECONDITION"


class StaleEpoch(TinsmithError):
    """The caller's lease was taken over; it must stop."""

    default_code = "stale_epoch"
    http_status = 503
    grpc_status = "ABORTED"


class SnapshotNotFound(TinsmithError):
    """A sampler neither holds the snapshot nor finds it in the store."""

    category = "user"
    default_code = "snapshot_not_found"
    http_status = 404
    grpc_status = "NOT_FOUND"


class DataLoss(TinsmithError):
    """Received bytes differ from the sent ones."""

    default_code = "data_loss"
    http_status = 500
    grpc_status = "DATA_LOSS"


class StorageAway(TinsmithError):
    """What is to be read is in a storage that does not answer at present, or not with it."""

    default_code = "storage_away"
    http_status = 503
    grpc_status = "UNAVAILABLE"
    retry_after = 30


class StorageFull(TinsmithError):
    """A checkpoint could not be written for want of space. It can be saved again."""

    default_code = "storage_full"
    http_status = 507
    grpc_status = "RESOURCE_EXHAUSTED"


_BY_CODE: dict[str, type[TinsmithError]] = {
    each.default_code: each
    for each in list(globals().values())
    if isinstance(each, type) and issubclass(each, TinsmithError) and each is not TinsmithError
}

_CATEGORY_TO_PB = {
    "user": types_pb2.ERROR_CATEGORY_USER,
    "server": types_pb2.ERROR_CATEGORY_SERVER,
}


def by_code(code: str, category: str, message: str) -> TinsmithError:
    """The error whose class has this code; an unknown code keeps its category."""
    cls = _BY_CODE.get(code) or (InvalidRequest if category == "user" else Internal)
    return cls(message, code)


def to_pb(error: BaseException) -> types_pb2.Error:
    """Any exception as a protobuf Error; what is not a TinsmithError is an internal one."""
    if not isinstance(error, TinsmithError):
        error = Internal(f"{type(error).__name__}: {error}")
    return types_pb2.Error(category=_CATEGORY_TO_PB[error.category], code=error.code, message=error.message)


def from_pb(pb: types_pb2.Error) -> TinsmithError:
    """The typed error of a protobuf Error."""
    category = "user" if pb.category == types_pb2.ERROR_CATEGORY_USER else "server"
    return by_code(pb.code, category, pb.message)
