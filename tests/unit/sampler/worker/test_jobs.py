"""Work beside the engine's steps: it takes effect once, or never."""

from __future__ import annotations

import errno
import gc
import queue
import threading
import time
import weakref
from collections.abc import Callable

import pytest

from services.common.contract.errors import DataLoss
from services.sampler.worker.jobs import Job, Outcome


def until(holds: Callable[[], bool]) -> None:
    """Waits for a thread; there is nothing to subscribe to."""
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_nothing_takes_effect_when_the_work_is_done_and_its_end_is_told_once() -> None:
    effects: list[int] = []
    told: list[Outcome] = []

    def finish(result: int) -> int:
        effects.append(result)
        return 8

    gate = threading.Event()
    job = Job("work", lambda: gate.wait(60) and 7, told.append, finish)
    assert told == []
    gate.set()
    until(lambda: told == [["done"]])
    assert effects == []
    assert (job.finish(), effects, told) == (["ok", 8], [7], [["done"]])


def test_a_failure_is_told_with_its_code_and_an_unknown_one_as_internal() -> None:
    def fail(error: Exception) -> None:
        raise error

    told: list[Outcome] = []
    Job("typed", lambda: fail(DataLoss("checksum")), told.append)
    until(lambda: told == [["error", "data_loss", "server", "checksum"]])
    Job("untyped", lambda: fail(OSError("disk")), told.append)
    until(lambda: told[1:] == [["error", "internal", "server", "OSError: disk"]])


def test_of_failures_of_one_kind_of_work_the_log_has_the_first_whatever_the_work_was_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail() -> None:
        raise OSError(errno.EIO, "the store does not answer")

    told = queue.Queue[Outcome]()
    for adapter_id in range(5):
        Job(f"trial-{adapter_id}", fail, told.put)
        told.get(timeout=60)
    assert caplog.text.count("Traceback") == 1
    assert [one for one in caplog.messages if one.startswith("a job of a worker failed: trial: ")]


def ignored(outcome: Outcome) -> None:
    """Nobody is told."""


class Tensors:
    """Something large."""


def test_the_result_of_a_forgotten_job_is_freed_although_its_work_ends_later() -> None:
    gate = threading.Event()
    made: list[weakref.ref[Tensors]] = []

    def work() -> Tensors:
        gate.wait(60)
        tensors = Tensors()
        made.append(weakref.ref(tensors))
        return tensors

    jobs = {"receive": Job("receive", work, ignored)}
    jobs.pop("receive").forget()
    gate.set()
    until(lambda: bool(made) and gc.collect() >= 0 and made[0]() is None)


def test_what_a_forgotten_job_makes_is_done_away_with_whether_it_was_done_or_not() -> None:
    discarded: list[str] = []
    gate = threading.Event()
    late = Job("late", lambda: gate.wait(60) and "late", ignored, discard=discarded.append)
    late.forget()
    told: list[Outcome] = []
    done = Job("done", lambda: "done", told.append, discard=discarded.append)
    until(lambda: told == [["done"]])
    done.forget()
    until(lambda: discarded == ["done"])
    gate.set()
    until(lambda: discarded == ["done", "late"])
