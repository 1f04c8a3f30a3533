"""Asking for copies, of a storage that is slow or full."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from services.common.storage.base import Key
from tests.unit.gateway.edges import Edges


class SlowDisk:
    """Copies of the storage wait until they may go on."""

    def __init__(self, edges: Edges, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = threading.Event()
        self.goes_on = threading.Event()
        self.copies = 0
        self._copy = edges.files.storage.copy
        monkeypatch.setattr(edges.files.storage, "copy", self.copy)

    def copy(self, source: Key, target: Key, go_on: Callable[[], None]) -> int | None:
        self.copies += 1
        self.begun.set()
        assert self.goes_on.wait(30)
        return self._copy(source, target, go_on)


async def copy(client: httpx.AsyncClient, path: str, key: str = "", **fields: Any) -> httpx.Response:
    """A copy into the project "archive", unless the fields say otherwise."""
    where = {} if "session_id" in fields else {"destination_project_id": "archive"}
    headers = {"x-idempotency-key": key} if key else {}
    return await client.post("copy_weights", json={"source_path": path, **where, **fields}, headers=headers)


async def copied(client: httpx.AsyncClient, path: str, key: str = "", **fields: Any) -> str:
    response = await copy(client, path, key, **fields)
    assert response.status_code == 200, response.text
    return response.json()["tinker_path"]


async def runs_of(client: httpx.AsyncClient) -> list[str]:
    found = (await client.get("training_runs", params={"limit": 100})).json()["training_runs"]
    return [run["training_run_id"] for run in found]


def break_disk(edges: Edges, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> int | None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(edges.files.storage, "copy", fails)
