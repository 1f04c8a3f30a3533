"""Pages of lists in Redis, whatever the language of the machine that it runs on."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.common.state import redis_client
from services.gateway.records.listed import Cursor, Pages
from tests.conftest import redis_server, redis_server_kinds

NAMES = ["A", "B", "a", "a-b", "a:b", "aB", "ab", "b", "\u00e4", "z"]

ORDER = """comment_char %
escape_char /
LC_COLLATE
order_start forward
<U0061>
<U0041>
<U0062>
<U0042>
order_end
END LC_COLLATE
"""
"""Letters as English dictionaries have them, both cases of each together."""


@pytest.fixture(params=list(redis_server_kinds()))
def english_redis_url(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """A server that was started where "a" comes before "B"."""
    if shutil.which("localedef") is None:
        pytest.skip("no locale can be made here")
    (tmp_path / "order").write_text(ORDER)
    # It says with its status that categories are missing, and makes the locale all the same.
    subprocess.run(
        ["localedef", "-c", "-i", str(tmp_path / "order"), "-f", "ANSI_X3.4-1968", str(tmp_path / "english")],
        check=False,
        capture_output=True,
        timeout=60,
    )
    monkeypatch.setenv("LOCPATH", str(tmp_path))
    monkeypatch.setenv("LC_ALL", "english")
    with redis_server(redis_server_kinds()[request.param], tmp_path / "redis") as url:
        yield url


async def test_pages_neither_repeat_nor_leave_out_names_of_one_moment(english_redis_url: str) -> None:
    client = redis_client.connect(english_redis_url)
    try:
        assert await client.eval("return 'a' < 'B'", 0), "the server's language is another"
        await client.zadd("list", dict.fromkeys(NAMES, 1.5))
        pages, cursor, found = Pages(client), None, []
        for _ in range(len(NAMES)):
            page = await pages.read("list", 1, cursor)
            found += page.names
            cursor = page.next
        assert found == sorted(NAMES, key=str.encode, reverse=True)
        assert cursor is None
        # A name that is gone keeps its place.
        assert (await pages.read("list", 1, Cursor(1.5, "aA"))).names == ["a:b"]
    finally:
        await client.aclose()
