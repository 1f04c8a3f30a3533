"""What workers say of their jobs: who may say it, and what becomes of what is not such a report."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from pathlib import Path

import pytest

from services.common.contract.errors import DeadlineExceeded, Unavailable
from services.sampler.engine.calls.reports import Reports
from services.sampler.worker.jobs import REPORT_BYTES, Reporter


async def test_the_socket_is_for_this_user_alone_and_gone_once_the_workers_are_there() -> None:
    reports = Reports(2)
    async with reports.listening(60) as path:
        directory = Path(path).parent
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert directory.stat().st_uid == os.getuid()
        workers = [Reporter(path, rank) for rank in (1, 0)]
    assert not directory.exists()
    with reports.expected("job") as reported:
        for rank, worker in enumerate(workers):
            worker.tell("job", ["error", "internal", "server", f"of {rank}"])
        assert [outcome[3] for outcome in await reported()] == ["of 1", "of 0"]
    await reports.close()


async def test_a_worker_that_does_not_connect_ends_the_start() -> None:
    reports = Reports(2)
    with pytest.raises(DeadlineExceeded, match=r"workers \[1\] did not connect"):
        async with reports.listening(2.0) as path:
            worker = Reporter(path, 0)
    assert not Path(path).parent.exists()
    del worker
    await reports.close()


async def test_reports_of_jobs_that_nobody_waits_for_are_not_kept_and_do_no_harm() -> None:
    reports = Reports(1)
    async with reports.listening(60) as path:
        worker = Reporter(path, 0)
    worker.tell("forgotten", ["done"])
    with reports.expected("job") as reported:
        worker.tell("forgotten", ["done"])
        worker.tell("job", ["done"])
        assert await reported() == [["done"]]
    worker.tell("job", ["done"])
    with reports.expected("next") as reported:
        worker.tell("next", ["done"])
        assert await reported() == [["done"]]
    assert not reports.broken
    await reports.close()


async def test_a_message_of_any_length_and_characters_is_told_as_far_as_a_report_has_room() -> None:
    reports = Reports(1)
    async with reports.listening(60) as path:
        worker = Reporter(path, 0)
    with reports.expected("first") as reported:
        worker.tell("first", ["error", "internal", "server", os.fsdecode(b"no file \xff")])
        assert (await reported())[0][3] == "no file ?"
    with reports.expected("job") as reported:
        worker.tell("job", ["error", "internal", "server", "\x00" * REPORT_BYTES])
        ((*_, message),) = await reported()
    assert 1000 < len(message) < REPORT_BYTES and set(message) == {"\x00"}
    await reports.close()


@pytest.mark.parametrize(
    "said",
    [
        b"no json\n",
        b'{"rank":0,"job":7}\n',
        b'{"rank":1}\n',
        b'{"rank":-1}\n',
        b'{"rank":0,"job":"half',
        b"x" * (2 * REPORT_BYTES) + b"\n",
    ],
)
async def test_who_says_anything_else_is_taken_for_a_worker_that_ends(said: bytes) -> None:
    reports = Reports(1)
    async with reports.listening(60) as path:
        worker = Reporter(path, 0)
        other = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        other.connect(path)
    with reports.expected("job") as reported:
        waiting = asyncio.ensure_future(reported())
        await asyncio.to_thread(other.sendall, said)
        other.close()
        with pytest.raises(Unavailable):
            await waiting
    worker.tell("job", ["done"])
    await reports.close()
