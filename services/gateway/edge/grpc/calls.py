"""What all parts of the public service share: the application and who calls.

Invariant: every method knows the caller before it does anything.
"""

from __future__ import annotations

from typing import TypeAlias

import grpc.aio

from services.gateway.application import Application
from services.gateway.edge.grpc.receive import key_of
from services.gateway.identity.key import Caller

Context: TypeAlias = grpc.aio.ServicerContext


class Calls:
    """Base of the groups of methods."""

    def __init__(self, application: Application) -> None:
        self._app = application

    def _caller(self, context: Context) -> Caller:
        """Who calls. Raises as `_owner`."""
        return self._app.keys.caller_of(key_of(context.invocation_metadata()))

    def _owner(self, context: Context) -> str:
        """The owner of the caller's key.

        Raises:
            Unauthenticated: the key has ended since the call began.
        """
        return self._app.keys.owner_of(key_of(context.invocation_metadata()))
