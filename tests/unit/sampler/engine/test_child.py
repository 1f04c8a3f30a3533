"""Processes of an engine write where they are to their log, also what others started, and end quickly."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from services.sampler.engine import child
from tests.unit.common.process import garbage

# Each starts the next one, as the engine's core starts its workers; the last one heeds no signal.
CHAIN = """
import faulthandler, pathlib, subprocess, sys, time
depth, chain, directory = int(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3])
def hang_at_depth_{depth}():
    if depth:
        subprocess.Popen([sys.executable, "-c", chain, str(depth - 1), chain, str(directory)])
        stacks = (directory / f"stacks-{depth}").open("w")
        faulthandler.register({signal}, stacks, all_threads=True)
    (directory / f"there-{depth}").touch()
    time.sleep(600)
hang_at_depth_{depth}()
""".replace("{signal}", str(int(child.STACKS_SIGNAL))).replace("_{depth}", "")


def test_every_process_below_writes_its_stacks_and_those_that_cannot_go_on(tmp_path: Path) -> None:
    first = subprocess.Popen([sys.executable, "-c", CHAIN, "2", CHAIN, str(tmp_path)], start_new_session=True)
    try:
        until(lambda: len(list(tmp_path.glob("there-*"))) == 3)
        asyncio.run(child.dump_stacks(os.getpid()))
        stacks = [tmp_path / "stacks-2", tmp_path / "stacks-1"]
        until(lambda: all("in hang_at_depth" in path.read_text() for path in stacks))
        second, last = child._below(first.pid)
        states = [Path(f"/proc/{pid}/stat").read_text().split()[2] for pid in (first.pid, second, last)]
        assert not {"Z", "X"} & set(states), "none of them has ended"
    finally:
        os.killpg(first.pid, 9)
        first.wait()


def test_the_stacks_of_one_process_are_written_before_those_of_the_next_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[object] = []

    async def waits(seconds: float) -> None:
        done.append(seconds)

    monkeypatch.setattr(child, "_below", lambda _: [11, 12])
    monkeypatch.setattr(child, "_heeds_stacks_signal", lambda _: True)
    monkeypatch.setattr(child.os, "kill", lambda pid, _: done.append(pid))
    monkeypatch.setattr(child.asyncio, "sleep", waits)
    asyncio.run(child.dump_stacks(1))
    assert done == [11, child._APART_S, 12, child._APART_S]


def test_an_engine_ends_without_a_look_for_garbage() -> None:
    begins = "import runpy; runpy.run_module('services.sampler.engine.child', run_name='__mp_main__')"
    assert not garbage.is_looked_for_after(begins)


def until(holds: Callable[[], bool]) -> None:
    """Waits for other processes."""
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)
