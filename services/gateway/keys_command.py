"""API keys from the command line: `tinsmith keys`, and beside a gateway in its container

    python -m services.gateway.keys_command create alice

which asks the Redis of TINSMITH_REDIS_URL. Invariant: a key is printed once, when it is made, and alone on
standard output.
"""

from __future__ import annotations

import argparse
import asyncio
import getpass
import os
import re
import sys
import time
from collections.abc import Sequence

import msgspec
from redis.exceptions import RedisError

from services.common.contract.errors import InvalidRequest, TinsmithError, Unavailable
from services.common.process import clock
from services.common.state import redis_client
from services.gateway.audit.record import AuditRecord, new_id
from services.gateway.audit.store import AuditStore
from services.gateway.identity import keys_file
from services.gateway.identity.key import ROLES, SCOPES, KeyRecord, Rights, described, mint
from services.gateway.identity.key_store import KeyStore

OPERATOR = "operator"
"""Who is said to have done what commands do, beside the name of the user of the machine."""
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_ONCE = "This is the only time that the key is shown. Gateways let it in within two seconds."


def add_commands(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """Adds create, list, revoke and rotate; all of them."""
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    create = verbs.add_parser("create", help="make a key and print it")
    create.add_argument("owner", metavar="OWNER", help="whose things are made with it; new or known")
    create.add_argument("--role", choices=ROLES, default="user", help="default: user")
    create.add_argument(
        "--scope", action="append", choices=SCOPES, default=[], help="limit it; repeat for several"
    )
    create.add_argument("--expires-in", type=seconds, metavar="TIME", help="such as 90d, 12h or 30m")
    create.add_argument("--note", default="", metavar="TEXT", help="what it is for")
    create.add_argument(
        "--for-file",
        action="store_true",
        help="keep nothing in Redis; also print the line for a mounted file of keys, on standard error",
    )
    listed = verbs.add_parser("list", help="what keys there are in Redis, without the keys themselves")
    listed.add_argument("--json", action="store_true", help="print JSON")
    revoke = verbs.add_parser("revoke", help="end a key; no gateway lets it in after two seconds")
    revoke.add_argument("id", metavar="ID")
    rotate = verbs.add_parser("rotate", help="make a key with the owner and rights of another, which ends")
    rotate.add_argument("id", metavar="ID")
    rotate.add_argument(
        "--keep-old", type=seconds, default=0.0, metavar="TIME", help="let the old one in for so long"
    )
    return [create, listed, revoke, rotate]


def seconds(text: str) -> float:
    """A time such as 90d in seconds."""
    found = re.fullmatch(r"([0-9]{1,9})([smhd])", text)
    if found is None or int(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"expected a time such as 90d, 12h, 30m or 45s, not {text!r}")
    return float(int(found[1]) * _UNITS[found[2]])


def needs_redis(args: argparse.Namespace) -> bool:
    """Whether the command asks Redis."""
    return not (args.verb == "create" and args.for_file)


def run(args: argparse.Namespace, redis_url: str) -> None:
    """Carries out a command of `add_commands`.

    Raises:
        InvalidRequest, NotFound, LimitReached: what was asked for cannot be.
        Unavailable: Redis does not answer.
    """
    if not needs_redis(args):
        record, key = mint(_rights(args), time.time())
        print(key)
        print(f"The line for the file:\n{keys_file.line_of(record)}", file=sys.stderr)
        return

    async def connected() -> None:
        client = redis_client.connect(redis_url)
        try:
            clock.hear(await redis_client.time_of(client))
            await _carry_out(args, KeyStore(client), AuditStore(client))
        except RedisError as error:
            raise Unavailable(f"Redis does not answer: {error}") from error
        finally:
            await client.aclose()

    asyncio.run(connected())


async def _carry_out(args: argparse.Namespace, store: KeyStore, audit: AuditStore) -> None:
    if args.verb == "create":
        record, key = await store.create(_rights(args))
        _tell(record, key)
        await _write_down(audit, "create", record.id, {"owner": record.owner, "role": record.role})
    elif args.verb == "rotate":
        record, key = await store.rotate(args.id, args.keep_old)
        _tell(record, key)
        await _write_down(audit, "rotate", args.id, {"owner": record.owner, "new": record.id})
    elif args.verb == "revoke":
        record = await store.revoke(args.id)
        print(f"key {record.id} of {record.owner} is revoked", file=sys.stderr)
        await _write_down(audit, "revoke", record.id, {"owner": record.owner})
    else:
        _print(await store.all(), await store.used(), args.json)


async def _write_down(audit: AuditStore, verb: str, key_id: str, details: dict[str, str]) -> None:
    """Keeps a record of what was done, which is done by then whatever becomes of the record."""
    record = AuditRecord(
        id=new_id(),
        at=time.time(),
        event=f"key_{verb}",
        outcome="ok",
        owner=OPERATOR,
        method=f"tinsmith keys {verb}",
        object=key_id,
        details={**details, "user": _user()},
    )
    try:
        await audit.add([record])
    except RedisError as error:
        print(f"the audit has no record of this: {error}", file=sys.stderr)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        # A container's user may have no name.
        return str(os.getuid())


def _rights(args: argparse.Namespace) -> Rights:
    until = None if args.expires_in is None else time.time() + args.expires_in
    return Rights(args.owner, args.role, tuple(args.scope), until, args.note)


def _tell(record: KeyRecord, key: str) -> None:
    print(key, flush=True)
    print(f"key {record.id} of {record.owner}, role {record.role}. {_ONCE}", file=sys.stderr)


def _print(records: Sequence[KeyRecord], used: dict[str, float], as_json: bool) -> None:
    if as_json:
        rows = [
            {
                "id": record.id,
                "owner": record.owner,
                "role": record.role,
                "scopes": record.scopes,
                "created_at": record.created_at,
                "expires_at": record.expires_at,
                "last_used_at": used.get(record.id),
                "note": record.note,
            }
            for record in records
        ]
        print(msgspec.json.format(msgspec.json.encode(rows)).decode())
        return
    print(f"{'ID':<14}{'OWNER':<20}{'ROLE':<7}{'MAY':<28}{'ENDS':<18}{'LAST USED':<18}NOTE")
    for record in records:
        ends, last = _date(record.expires_at), _date(used.get(record.id))
        scopes = described(record.scopes)
        print(
            f"{record.id:<12}  {record.owner:<18}  {record.role:<5}  {scopes:<26}  {ends:<16}  {last:<16}  "
            f"{record.note}"
        )


def _date(at: float | None) -> str:
    return "-" if at is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(at))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m services.gateway.keys_command")
    add_commands(parser)
    args = parser.parse_args()
    try:
        url = os.environ.get("TINSMITH_REDIS_URL", "")
        if not url and needs_redis(args):
            raise InvalidRequest("set TINSMITH_REDIS_URL")
        run(args, url)
    except TinsmithError as error:
        sys.exit(error.message)


if __name__ == "__main__":
    main()
