"""`tinsmith admin`: what an operator asks of a cluster that runs, over gRPC.

Invariants: the API key comes from TINKER_API_KEY and never from a command line; every call has a deadline; a
list is read page by page, and no more of it than is printed.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import grpc.aio

from services.common.contract.errors import DeadlineExceeded, InvalidRequest, TinsmithError, Unavailable
from services.common.process.rpc import from_rpc_error
from tinsmith.v1 import admin_pb2, admin_pb2_grpc

_TIMEOUT_S = 30.0
_PAGE = 500
_KINDS = {
    admin_pb2.SERVICE_KIND_GATEWAY: "gateway",
    admin_pb2.SERVICE_KIND_TRAINER: "trainer",
    admin_pb2.SERVICE_KIND_SAMPLER: "sampler",
}

Ask: TypeAlias = Callable[[str, Any], Awaitable[Any]]
"""Calls a method of AdminService."""


def run(args: argparse.Namespace, api_key: str | None) -> None:
    """Carries out a command of `admin_verbs`.

    Raises:
        InvalidRequest: there is no API key, or what was asked for cannot be.
        TinsmithError: the cluster refuses, or does not answer.
    """
    if not api_key:
        raise InvalidRequest(
            "set TINKER_API_KEY to a key of role admin (tinsmith keys create NAME --role admin)"
        )
    asyncio.run(_run(args, api_key))


async def _run(args: argparse.Namespace, api_key: str) -> None:
    async with _channel(args.address, args.ca) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)

        async def ask(method: str, request: Any) -> Any:
            try:
                metadata = (("x-api-key", api_key),)
                return await getattr(stub, method)(request, metadata=metadata, timeout=_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                raise _typed(error, args.address) from error

        await _VERBS[args.verb](args, ask)


def _channel(address: str, authorities: Path | None) -> grpc.aio.Channel:
    if authorities is None:
        return grpc.aio.insecure_channel(address)
    try:
        known = authorities.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{authorities} cannot be read: {error}") from error
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(known))


def _typed(error: grpc.aio.AioRpcError, address: str) -> TinsmithError:
    found = from_rpc_error(error)
    if isinstance(found, DeadlineExceeded):
        return Unavailable(f"{address} did not answer within {_TIMEOUT_S:.0f} s; its log may say why")
    if isinstance(found, Unavailable):
        return Unavailable(f"{address} does not answer: {found.message}")
    if isinstance(found, InvalidRequest) and error.code() is not grpc.StatusCode.INVALID_ARGUMENT:
        # It was asked for in the right way.
        return TinsmithError(found.message)
    return found


async def _pages(
    ask: Ask, heading: str, method: str, request: Any, field: str, most: int
) -> AsyncIterator[tuple[Any, Any]]:
    """(entry, answer that it came with) of a list, at most so many, below the heading."""
    left = most
    while left > 0:
        request.page_size = min(left, _PAGE)
        answer = await ask(method, request)
        if left == most:
            print(heading)
        for entry in getattr(answer, field):
            yield entry, answer
        left -= request.page_size
        request.page_token = answer.next_page_token
        if not answer.next_page_token:
            return
    print(f"... and more; --most says how many (now {most})")


async def _sessions(args: argparse.Namespace, ask: Ask) -> None:
    request = admin_pb2.ListClusterSessionsRequest(owner=args.owner)
    heading = f"{'SESSION':<38}{'OWNER':<14}{'MADE':>6}{'HEARD':>7}{'MODELS':>8}  STATE  NAME"
    async for one, _ in _pages(ask, heading, "ListClusterSessions", request, "sessions", args.most):
        print(session_line(one, time.time()))


def session_line(session: admin_pb2.ClusterSession, now: float) -> str:
    """A line of the list of sessions; as `service_line`."""
    made, heard = _ago(session.created_at, now), _ago(session.last_heard_of_at, now)
    return (
        f"{session.session_id:<36}  {session.owner:<12}  {made:>6}{heard:>7}  {session.models:>6}  "
        f"{'over' if session.over else 'open':<5}  {session.display_name or session.project_id or '-'}"
    )


async def _end_session(args: argparse.Namespace, ask: Ask) -> None:
    await ask("EndSession", admin_pb2.EndSessionRequest(session_id=args.session, detail=args.why))
    print(f"session {args.session} is over")


async def _services(args: argparse.Namespace, ask: Ask) -> None:
    heading = f"{'ID':<24}{'KIND':<9}{'STATE':<15}{'MODELS':>6}{'QUEUED':>8}  {'ADDRESS':<24}BASE MODEL"
    request = admin_pb2.ListServicesRequest()
    async for one, _ in _pages(ask, heading, "ListServices", request, "services", args.most):
        print(service_line(one))


def service_line(service: admin_pb2.Service) -> str:
    """A line of the list of services. A name that is longer than its column has two spaces after it, too."""
    state, kind = _state(service), _KINDS.get(service.kind, "?")
    return (
        f"{service.id:<22}  {kind:<9}{state:<13}  {service.models:>6}{service.queued:>8}  "
        f"{service.address:<22}  {service.base_model}"
    )


def _state(service: admin_pb2.Service) -> str:
    if service.drained:
        return "drained" if service.alive else "drained, gone"
    return "ready" if service.ready else "draining"


async def _drain(args: argparse.Namespace, ask: Ask) -> None:
    found = await ask("DrainService", admin_pb2.DrainServiceRequest(id=args.id))
    print(f"{args.id} is given nothing new; it has {found.models} models and {found.queued} operations now")


async def _undrain(args: argparse.Namespace, ask: Ask) -> None:
    await ask("UndrainService", admin_pb2.UndrainServiceRequest(id=args.id))
    print(f"{args.id} is given work again")


async def _retire(args: argparse.Namespace, ask: Ask) -> None:
    await ask("RetireBaseModel", admin_pb2.RetireBaseModelRequest(base_model=args.name))
    print(f"{args.name} is retired: what waits for it fails, and new requests for it are refused")


async def _unreadable(args: argparse.Namespace, ask: Ask) -> None:
    heading = f"{'MET':>8}  {'LAST':<18}NAME: REASON"
    request = admin_pb2.ListUnreadableRequest()
    async for one, _ in _pages(ask, heading, "ListUnreadable", request, "unreadable", args.most):
        print(f"{one.count:>8}  {_date(one.last_met_at):<18}{one.name}: {one.reason}")


async def _drop(args: argparse.Namespace, ask: Ask) -> None:
    found = await ask("DropUnreadable", admin_pb2.DropUnreadableRequest(name=args.name))
    print(
        "forgotten, and taken out of its list" if found.removed else "forgotten; it is noted when met again"
    )


async def _owners(args: argparse.Namespace, ask: Ask) -> None:
    limits: admin_pb2.OwnerLimits | None = None
    request = admin_pb2.ListOwnersRequest()
    async for one, answer in _pages(ask, OWNERS, "ListOwners", request, "owners", args.most):
        limits = answer.limits
        print(owner_line(one))
    if limits is not None:
        files = f"{limits.checkpoint_bytes >> 20}" if limits.checkpoint_bytes else "no bound"
        print(_owner("each may have", (limits.sessions, limits.models, limits.checkpoints, files)))


def owner_line(owner: admin_pb2.OwnerUse) -> str:
    """A line of the list of owners; as `service_line`."""
    sizes = (size >> 20 for size in (owner.checkpoint_bytes, owner.snapshot_bytes, owner.state_bytes))
    counts = (owner.sessions, owner.models, owner.checkpoints)
    return _owner(owner.owner, (*counts, *sizes, owner.waiting_operations))


def _owner(name: str, cells: Iterable[object]) -> str:
    return f"{name:<14}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS, strict=False))


_WIDTHS = (10, 8, 7, 11, 13, 11, 9)
OWNERS = _owner("OWNER", ("SESSIONS", "MODELS", "SAVED", "SAVED MiB", "UNNAMED MiB", "REDIS MiB", "WAITING"))
"""Heading of the list of owners: what is saved is checkpoints, what has no name snapshots for samplers; and
operations wait."""


_VERBS: dict[str, Callable[[argparse.Namespace, Ask], Awaitable[None]]] = {
    "sessions": _sessions,
    "end-session": _end_session,
    "services": _services,
    "drain": _drain,
    "undrain": _undrain,
    "retire": _retire,
    "unreadable": _unreadable,
    "drop": _drop,
    "owners": _owners,
}


def _date(at: Any) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at.ToSeconds()))


def _ago(at: Any, now: float) -> str:
    """How long ago, in the largest unit of which it is two at least, so that a column stays narrow."""
    seconds = max(0, int(now - at.ToSeconds()))
    sizes = ((86_400, "d"), (3_600, "h"), (60, "m"))
    return next((f"{seconds // size} {unit}" for size, unit in sizes if seconds >= 2 * size), f"{seconds} s")
