"""Operations of owners, and what is there of them in Redis."""

from __future__ import annotations

import redis.asyncio

from services.common.contract import ids
from services.common.state import keys
from services.gateway.dispatch.leases import Lease, Leases
from tinsmith.internal.v1 import operation_pb2
from tinsmith.v1 import results_pb2, training_pb2

ENTRY = 512
KIB = 1024
OWNERS = ("ann", "ben", "cleo")


def model(owner: str) -> str:
    return ids.model_id(f"of-{owner}", 0)


def creation(owner: str) -> operation_pb2.Operation:
    return operation_pb2.Operation(
        model_id=model(owner), seq_id=0, create_model=operation_pb2.CreateModel(base_model="org/base")
    )


def batch(owner: str, seq_id: int, nbytes: int = 100, forward_only: bool = False) -> operation_pb2.Operation:
    forward = training_pb2.ForwardBackward(loss_fn="x" * nbytes, forward_only=forward_only)
    return operation_pb2.Operation(model_id=model(owner), seq_id=seq_id, forward_backward=forward)


def step(owner: str, seq_id: int) -> operation_pb2.Operation:
    made = operation_pb2.OptimStep(adam=training_pb2.AdamParams(learning_rate=0.1))
    return operation_pb2.Operation(model_id=model(owner), seq_id=seq_id, optim_step=made)


def sampled(nbytes: int) -> results_pb2.OperationResult:
    result = results_pb2.OperationResult()
    result.sample.sequences.add().tokens.data = b"x" * nbytes
    return result


async def lead(client: redis.asyncio.Redis, owner: str) -> Lease:
    lease = await Leases(client, "gateway-0").acquire(model(owner))
    assert isinstance(lease, Lease)
    return lease


async def held(client: redis.asyncio.Redis, owner: str = "*") -> int:
    return int(await client.hget(keys.HELD_BYTES, owner) or 0)


async def results_there(client: redis.asyncio.Redis) -> int:
    """What results take, found by looking at all futures."""
    names = [name async for name in client.scan_iter(f"{keys.PREFIX}:future:*")]
    futures = [await client.hgetall(name) for name in names]
    return sum(len(future[b"result"]) + ENTRY for future in futures if future[b"state"] == b"done")


async def journals_there(client: redis.asyncio.Redis) -> int:
    """What operations in journals take, found by looking at all of them."""
    journals = [await client.hvals(keys.journal(model(owner))) for owner in OWNERS]
    return sum(len(payload) for journal in journals for payload in journal)


async def there(client: redis.asyncio.Redis) -> dict[str, int]:
    """What each owner holds, found by looking at everything."""
    found = dict.fromkeys(OWNERS, 0)
    for owner in OWNERS:
        payloads = await client.hvals(keys.journal(model(owner)))
        found[owner] += sum(len(payload) for payload in payloads)
    async for name in client.scan_iter(f"{keys.PREFIX}:future:*"):
        future = await client.hgetall(name)
        if future[b"state"] == b"pending":
            size = int(future.get(b"held", ENTRY))
        else:
            size = len(future[b"result"]) + ENTRY
        found[future[b"owner"].decode()] += size
    return found


async def expire(client: redis.asyncio.Redis, seconds: int) -> None:
    """Has results go that have at most so many seconds left, as if these had passed."""
    async for name in client.scan_iter(f"{keys.PREFIX}:future:*"):
        if 0 <= await client.ttl(name) <= seconds:
            await client.delete(name)
    now = (await client.time())[0]
    for slot, at in await client.zrange(keys.EXPIRING_BYTES, 0, -1, withscores=True):
        if at <= now + seconds + 600:
            await client.zadd(keys.EXPIRING_BYTES, {slot: 1})
