"""Ends the serving of a base model: `tinsmith models retire`, and beside a gateway in its container

    python -m services.gateway.retire NAME

which asks the Redis of TINSMITH_REDIS_URL. Invariant: a base model that a trainer or sampler serves stays.
"""

from __future__ import annotations

import asyncio
import os
import sys

from redis.exceptions import RedisError

from services.common.contract.errors import InvalidRequest, TinsmithError, Unavailable
from services.common.state import redis_client
from services.gateway.administration.base_models import retire
from services.gateway.config import REDIS_URL_VARIABLE

_RETIRED = """\
{} is retired: what waits for it fails, and new requests for it are refused.
A gateway that is started with it in --base-models, or a trainer or sampler of it, brings it back."""


def run(redis_url: str, name: str) -> None:
    """Retires a base model and says what that means. Raises as `retire`.

    Raises:
        Unavailable: Redis does not answer.
    """

    async def connected() -> None:
        client = redis_client.connect(redis_url)
        try:
            await retire(client, name)
        except RedisError as error:
            raise Unavailable(f"Redis does not answer: {error}") from error
        finally:
            await client.aclose()

    asyncio.run(connected())
    print(_RETIRED.format(name))


def main() -> None:
    try:
        if len(sys.argv) != 2:
            raise InvalidRequest("usage: python -m services.gateway.retire NAME")
        url = os.environ.get(REDIS_URL_VARIABLE)
        if not url:
            raise InvalidRequest(f"set {REDIS_URL_VARIABLE}")
        run(url, sys.argv[1])
    except TinsmithError as error:
        sys.exit(error.message)


if __name__ == "__main__":
    main()
