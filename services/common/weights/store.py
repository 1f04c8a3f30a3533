"""Rendezvous of a process group over Redis: `torch.distributed.Store` on one Redis hash.

Invariant: all keys of a group live in one hash that expires, so a group that never came together
leaves nothing behind.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import cast

import redis
import torch.distributed as dist

_TTL_S = 3600
_POLL_S = 0.005
_POLL_MAX_S = 0.05


class NotMet(RuntimeError):
    """Members of a group did not come in time.

    Attributes:
        absent: their ranks.
    """

    def __init__(self, absent: Sequence[int], seconds: float) -> None:
        ranks = ", ".join(map(str, absent))
        super().__init__(f"rank {ranks} did not come within {seconds:.0f} s")
        self.absent = tuple(absent)


class RedisStore(dist.Store):
    """Key-value store for ProcessGroupGloo and ProcessGroupNCCL: what these ask of one that is written in
    Python. Values are bytes."""

    def __init__(self, client: redis.Redis, name: str, timeout: float) -> None:
        super().__init__()
        self._redis = client
        self._name = name
        self._timeout = timedelta(seconds=timeout)

    def set(self, key: str, value: str | bytes) -> None:
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.hset(self._name, key, value)
        pipeline.expire(self._name, _TTL_S)
        pipeline.execute()

    def get(self, key: str) -> bytes:
        """The value; waits for it up to the store's timeout."""
        self.wait([key], self._timeout)
        return cast(bytes, self._redis.hget(self._name, key))

    def add(self, key: str, amount: int) -> int:
        return self._redis.hincrby(self._name, key, amount)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        script = (
            "local v = redis.call('HGET', KEYS[1], ARGV[1]) "
            "if v == ARGV[2] or (not v and ARGV[2] == '') then redis.call('HSET', KEYS[1], ARGV[1], ARGV[3]) "
            "return ARGV[3] end return v or ARGV[2]"
        )
        return self._redis.eval(script, 1, self._name, key, expected, desired)

    def wait(self, wanted: list[str], timeout: timedelta | None = None) -> None:
        """Returns when all keys exist.

        Raises:
            dist.DistStoreError: they did not within the timeout.
        """
        limit = timeout or self._timeout
        deadline = time.monotonic() + limit.total_seconds()
        pause = _POLL_S
        while not all(self._redis.hexists(self._name, key) for key in wanted):
            if time.monotonic() >= deadline:
                raise dist.DistStoreError(f"no {wanted} in {self._name} after {limit.total_seconds():.0f} s")
            time.sleep(pause)
            pause = min(pause * 2, _POLL_MAX_S)

    def meet(self, rank: int, world_size: int, seconds: float) -> None:
        """Tells that a rank is here, and returns when all are.

        Raises:
            NotMet: not all came within so many seconds.
        """
        self.set(_here(rank), b"1")
        try:
            self.wait([_here(each) for each in range(world_size)], timedelta(seconds=seconds))
        except dist.DistStoreError as error:
            absent = [each for each in range(world_size) if not self.check([_here(each)])]
            raise NotMet(absent, seconds) from error

    def check(self, wanted: list[str]) -> bool:
        return all(self._redis.hexists(self._name, key) for key in wanted)


def _here(rank: int) -> str:
    return f"here/{rank}"
