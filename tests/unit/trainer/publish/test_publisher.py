"""What is published is stored as it was first, and goes over the wire."""

from __future__ import annotations

import asyncio
import json
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from services.common.contract.errors import StorageAway
from services.common.contract.tensors import HostTensor
from services.common.storage.data_dir import DataDir
from services.launcher.tiny_model import make_tiny_model
from services.trainer.compute.data import LoraSpec, ModelState
from services.trainer.files.base import Base
from services.trainer.files.export_format import read_adapter
from services.trainer.publish.broadcast import Broadcaster
from services.trainer.publish.cargo import Cargo, whole_model
from services.trainer.publish.publisher import PACKED_BYTES, Pack, Published, Publisher

MODEL = "session:train:0"


class Wire:
    """Takes what a broadcaster would send."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, ...]] = []
        self.from_device = False
        self.may_send = asyncio.Event()
        self.may_send.set()

    def pack(self, lora: LoraSpec | None, tensors: Mapping[str, torch.Tensor]) -> Cargo:
        return whole_model(tensors)

    async def sends_from_device(self) -> bool:
        return self.from_device

    async def send(
        self, model_id: str, version: int, lora: LoraSpec | None, arrays: Mapping[str, HostTensor] | Cargo
    ) -> tuple[int, int]:
        if isinstance(arrays, Cargo):
            self.sent.append((model_id, version))
            await self.may_send.wait()
            return arrays.nbytes, 1
        self.sent.append((model_id, version, lora, dict(arrays)))
        return sum(len(array.data) for array in arrays.values()), 1


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def publisher(tmp_path: Path, wire: Wire) -> Publisher:
    make_tiny_model(tmp_path / "base", hidden=32, layers=1, heads=2, kv_heads=1, intermediate=32)
    return Publisher(DataDir(tmp_path), Base("org/base", str(tmp_path / "base")), cast(Broadcaster, wire))


def weights(directory: Path, factor: float) -> dict[str, HostTensor]:
    scaled = {name: tensor * factor for name, tensor in load_file(directory / "model.safetensors").items()}
    return {
        name: HostTensor("float32", tuple(tensor.shape), tensor.numpy().tobytes())
        for name, tensor in scaled.items()
    }


def stored_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())


async def test_an_adapter_is_stored_once_in_peft_format_and_sent_as_stored(
    tmp_path: Path, publisher: Publisher, wire: Wire, model_state: ModelState
) -> None:
    lora, adapter = model_state.lora, model_state.adapter
    published = await publisher.publish(MODEL, 7, lora, adapter)
    target = DataDir(tmp_path).snapshot(MODEL, 7)
    assert published.size_bytes == stored_bytes(target) > 0
    config = json.loads((target / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (2, 32, ["lm_head"])
    assert read_adapter(target) == adapter
    other = {name: HostTensor("float32", a.shape, bytes(len(a.data))) for name, a in adapter.items()}
    assert await publisher.publish(MODEL, 7, lora, other) == published
    assert read_adapter(target) == adapter
    assert wire.sent == [(MODEL, 7, lora, adapter)] * 2


async def test_the_store_is_away_while_its_volume_is(
    tmp_path: Path, publisher: Publisher, model_state: ModelState
) -> None:
    await publisher.answers()
    (tmp_path / "volume_id").rename(tmp_path / "away")
    with pytest.raises(StorageAway, match="mount that one there again"):
        await publisher.answers()
    # It may go after it answered.
    with pytest.raises(StorageAway, match="mount that one there again"):
        await publisher.publish(MODEL, 7, model_state.lora, model_state.adapter)
    (tmp_path / "away").rename(tmp_path / "volume_id")
    await publisher.answers()


async def test_a_snapshot_that_another_trainer_stored_meanwhile_stands(
    tmp_path: Path, publisher: Publisher, wire: Wire, model_state: ModelState, monkeypatch: pytest.MonkeyPatch
) -> None:
    lora, adapter = model_state.lora, model_state.adapter
    other = {name: HostTensor("float32", a.shape, bytes(len(a.data))) for name, a in adapter.items()}
    another = Publisher(publisher._data, publisher._base, cast(Broadcaster, Wire()))
    store = publisher._store

    def store_late(target: Path, *what: Any) -> int:
        another._store(target, lora, other)
        return store(target, *what)

    monkeypatch.setattr(publisher, "_store", store_late)
    await publisher.publish(MODEL, 7, lora, adapter)
    assert read_adapter(DataDir(tmp_path).snapshot(MODEL, 7)) == other
    assert wire.sent == [(MODEL, 7, lora, adapter)]


async def test_a_full_model_is_stored_as_one_that_transformers_loads_and_sent_as_it_is(
    tmp_path: Path, publisher: Publisher, wire: Wire
) -> None:
    tensors = weights(tmp_path / "base", 2.0)
    published = await publisher.publish(MODEL, 7, None, tensors)
    size = stored_bytes(DataDir(tmp_path).snapshot(MODEL, 7))
    assert published == Published(size, sum(len(array.data) for array in tensors.values()), 1)
    assert wire.sent == [(MODEL, 7, None, tensors)]
    loaded = AutoModelForCausalLM.from_pretrained(DataDir(tmp_path).snapshot(MODEL, 7)).state_dict()
    for name, array in tensors.items():
        expected = torch.frombuffer(bytearray(array.data), dtype=torch.float32).view(array.shape)
        assert torch.equal(loaded[name], expected), name


async def test_a_full_model_that_is_stored_stays_as_it_is_and_is_not_sent_again(
    tmp_path: Path, publisher: Publisher, wire: Wire
) -> None:
    await publisher.publish(MODEL, 7, None, weights(tmp_path / "base", 2.0))
    stored = (DataDir(tmp_path).snapshot(MODEL, 7) / "model.safetensors").read_bytes()
    size = stored_bytes(DataDir(tmp_path).snapshot(MODEL, 7))
    assert await publisher.publish(MODEL, 7, None, weights(tmp_path / "base", 3.0)) == Published(size, 0, 0)
    assert (DataDir(tmp_path).snapshot(MODEL, 7) / "model.safetensors").read_bytes() == stored
    assert len(wire.sent) == 1


@pytest.mark.parametrize("from_device", [False, True])
async def test_a_full_model_stays_on_the_device_only_while_it_is_sent_from_there(
    tmp_path: Path, publisher: Publisher, wire: Wire, monkeypatch: pytest.MonkeyPatch, from_device: bool
) -> None:
    arrays = weights(tmp_path / "base", 2.0)
    on_device = load_file(tmp_path / "base" / "model.safetensors")
    copies = {name: tensor * 2.0 for name, tensor in on_device.items()}
    cargo, there = whole_model(dict(copies)), [weakref.ref(copy) for copy in copies.values()]
    copies.clear()
    wire.from_device = from_device
    wire.may_send.clear()
    may_store, store = threading.Event(), publisher._store

    def store_late(*what: Any) -> int:
        assert may_store.wait(60)
        return store(*what)

    monkeypatch.setattr(publisher, "_store", store_late)
    published = asyncio.create_task(publisher.publish(MODEL, 7, None, arrays, cargo))
    async with asyncio.timeout(60):
        while not wire.sent:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert [copy() is not None for copy in there] == [from_device] * len(there)
    wire.may_send.set()
    async with asyncio.timeout(60):
        while any(copy() is not None for copy in there):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert not published.done(), "it is not stored yet"
    may_store.set()
    await published
    sent = b"".join(bucket.numpy().tobytes() for bucket in cargo.buckets())
    assert sent == b"".join(bytes(arrays[spec.name].data) for spec in cargo.specs)


def test_snapshots_are_packed_where_they_are_as_far_as_there_is_room_for_those_not_sent_yet(
    publisher: Publisher,
) -> None:
    def is_packed(pack: Pack) -> bool:
        return pack(None, {"weight": torch.zeros(1)}) is not None

    half = PACKED_BYTES // 2
    with publisher.packing(half) as first:
        with publisher.packing(half) as second, publisher.packing(1) as third:
            assert [is_packed(pack) for pack in (first, second, third)] == [True, True, False]
        with publisher.packing(half) as again:
            assert is_packed(again), "the second one was sent"
    with publisher.packing(2 * PACKED_BYTES) as large, publisher.packing(1) as small:
        assert is_packed(large), "one has room, however large it is"
        assert not is_packed(small)
    with publisher.packing(1) as small, publisher.packing(2 * PACKED_BYTES) as large:
        assert is_packed(small)
        assert not is_packed(large)
