"""What goes wrong, as exceptions."""

from __future__ import annotations

from collections.abc import Mapping

import grpc
from google.rpc import error_details_pb2, status_pb2

from tinsmith.v1 import types_pb2

_DETAILS = "grpc-status-details-bin"


class TinsmithError(Exception):
    """Base of all errors of this package."""


class CallFailed(TinsmithError):
    """A call ended with an error.

    Attributes:
        status: name of the gRPC status, such as "NOT_FOUND".
        reason: stable word for programs, such as "UNKNOWN_BASE_MODEL"; empty when gRPC refused the call.
        message: a sentence that says what to do.
        fields: paths of the request's fields that are at fault, with what to change.
        limit: flag of the gateway that sets the limit which was reached; empty = none.
        retry_after: seconds after which the same call may succeed; None = the service did not say so.
    """

    def __init__(self, error: grpc.RpcError) -> None:
        self.status: str = error.code().name
        self.message: str = error.details() or self.status
        self.reason = self.limit = ""
        self.fields: Mapping[str, str] = {}
        self.retry_after: float | None = None
        for key, value in error.trailing_metadata() or ():
            if key == _DETAILS:
                self._read(status_pb2.Status.FromString(value))
        super().__init__(f"{self.status}: {self.message}")

    def _read(self, status: status_pb2.Status) -> None:
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        bad = error_details_pb2.BadRequest()
        for detail in status.details:
            if detail.Unpack(info):
                self.reason, self.limit = info.reason, info.metadata.get("limit", "")
            elif detail.Unpack(retry):
                self.retry_after = retry.retry_delay.ToMilliseconds() / 1000
            elif detail.Unpack(bad):
                self.fields = {one.field: one.description for one in bad.field_violations}

    @property
    def passes(self) -> bool:
        """Whether the same call may succeed later."""
        return self.retry_after is not None or self.status in ("UNAVAILABLE", "DEADLINE_EXCEEDED")


class Refused(CallFailed):
    """The request has to change, or is not allowed. Nothing was accepted."""


class Unreachable(CallFailed):
    """The call failed for as long as it was repeated. It may have been accepted."""


class Changed(TinsmithError):
    """A sample goes on otherwise than it was begun. Ask for a new one."""


class RequestFailed(TinsmithError):
    """Accepted work failed. Its number is used up.

    Attributes:
        code: stable word for programs, such as "token_out_of_range".
        message: a sentence that says what to change.
        mine: whether the request has to change; otherwise it may succeed under a new number.
    """

    def __init__(self, error: types_pb2.Error) -> None:
        super().__init__(f"{error.code}: {error.message}")
        self.code, self.message = error.code, error.message
        self.mine = error.category == types_pb2.ERROR_CATEGORY_USER
