"""Processes of a later stage are started when all before them are ready."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
import redis.asyncio

from services.common.contract.errors import Unavailable
from services.launcher import up
from services.launcher.plan import Process
from services.launcher.progress import Progress
from services.launcher.supervisor import Supervisor

PROGRAM = """
import sys, time
from pathlib import Path
import redis
from services.common.state.registry import ServiceRecord
from tests.announced import announce
kind, name, url, directory = sys.argv[1:]
Path(directory, f"{name}-started").write_text(str(time.time()))
time.sleep(0.3)
Path(directory, f"{name}-ready").write_text(str(time.time()))
record = ServiceRecord(kind=kind, id=name, incarnation=name, address="127.0.0.1:1")
announce(redis.Redis.from_url(url), record, 60)
time.sleep(600)
"""


def process(kind: str, name: str, redis_url: str, directory: Path, program: str = PROGRAM) -> Process:
    argv = (sys.executable, "-c", program, kind, name, redis_url, str(directory))
    return Process(name, argv, announces=(kind, name))


def at(directory: Path, what: str) -> float:
    return float((directory / what).read_text())


async def test_each_stage_waits_for_the_one_before(
    redis_client: redis.asyncio.Redis, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(__file__).parents[3]
    supervisor = Supervisor(tmp_path, {"PYTHONPATH": str(root)})

    def made(kind: str, name: str) -> Process:
        return process(kind, name, redis_url, tmp_path)

    stages = [[made("gateway", "g"), made("trainer", "t")], [made("sampler", "s0")], [made("sampler", "s1")]]
    try:
        async with asyncio.timeout(60):
            await up._start(stages, redis_client, supervisor, Progress(tmp_path, False, []))
        assert at(tmp_path, "s0-started") > max(at(tmp_path, "g-ready"), at(tmp_path, "t-ready"))
        assert at(tmp_path, "s1-started") > at(tmp_path, "s0-ready")
        assert all(running.was_ready for running in supervisor.running.values())
    finally:
        await supervisor.stop()


async def test_what_never_gets_ready_ends_the_start_before_the_next_stage(
    redis_client: redis.asyncio.Redis, redis_url: str, tmp_path: Path
) -> None:
    supervisor = Supervisor(tmp_path, {})
    broken = process("trainer", "t", redis_url, tmp_path, "raise SystemExit('no such model')")
    stages = [[broken], [process("sampler", "s", redis_url, tmp_path)]]
    try:
        with pytest.raises(Unavailable, match="no such model"):
            async with asyncio.timeout(60):
                await up._start(stages, redis_client, supervisor, Progress(tmp_path, False, []))
        assert "s" not in supervisor.running
    finally:
        await supervisor.stop()
