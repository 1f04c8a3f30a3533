"""A snapshot of all weights of a model: what it was when it was taken, copied once and shared after that."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from services.common.contract.tensors import HostTensor
from services.trainer.compute.full.snapshot import FullSnapshot
from services.trainer.compute.memory import transfer
from services.trainer.compute.memory.room import has_room
from services.trainer.compute.memory.transfer import Copies, copied

CPU = torch.device("cpu")


def weights() -> dict[str, Tensor]:
    return {
        "model.embed_tokens.weight": torch.randn(7, 3).to(torch.bfloat16),
        "model.norm.weight": torch.randn(3),
        "model.scale": torch.randn(()),
        "model.across.weight": torch.randn(4, 6).T,
    }


def taken(tensors: Mapping[str, Tensor]) -> FullSnapshot:
    return FullSnapshot(list(tensors), Copies(copied(tensors.values()), CPU), 3)


def on_host(values: Tensor) -> HostTensor:
    dtype = str(values.dtype).removeprefix("torch.")
    elements = values.contiguous().view(-1).view(torch.uint8)
    return HostTensor(dtype, tuple(values.shape), elements.numpy().tobytes())


def test_it_stays_what_the_model_was() -> None:
    mine = weights()
    expected = {name: on_host(values) for name, values in mine.items()}
    snapshot = taken(mine)
    for values in mine.values():
        values.zero_()
    state = snapshot.state()
    assert (state.adapter, state.optimizer, state.step, state.lora) == (expected, {}, 3, None)
    assert (snapshot.role, snapshot.lora) == ("policy", None)


def test_what_is_sent_and_what_is_stored_are_one_copy() -> None:
    mine = weights()
    found: dict[str, Tensor] = {}
    state, made = taken(mine).unload(lambda tensors: found.update(tensors) or "packed")
    assert made == "packed" and list(found) == list(mine)
    for name, values in mine.items():
        assert torch.equal(found[name], values) and found[name].data_ptr() != values.data_ptr()
        stored = torch.frombuffer(state.adapter[name].data, dtype=torch.uint8)
        assert stored.data_ptr() == found[name].data_ptr()


def test_what_is_gathered_is_copied_before_the_next_one_is() -> None:
    gathered = torch.zeros(2)

    def gather() -> Iterator[Tensor]:
        for number in range(3):
            gathered.fill_(number)
            yield gathered

    with Copies(copied(gather()), CPU).beside() as copies:
        assert [copy.tolist() for copy in copies] == [[0, 0], [1, 1], [2, 2]]


def test_where_a_device_has_no_room_the_rest_goes_to_the_host_and_is_sent_from_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a device that keeps no elements, so that what is done with them is all that can be seen."""
    copy, asked = transfer._copy, []

    def full(values: Tensor, on_device: bool) -> Tensor:
        asked.append(on_device)
        return copy(values, on_device) if len(asked) < 2 else torch.zeros(values.shape)

    monkeypatch.setattr(transfer, "_copy", full)
    tensors = (torch.zeros(2, device="meta") for _ in range(4))
    copies = Copies(copied(tensors), torch.device("meta"))
    assert (asked, copies.on_device) == ([True, True, False, False], False)
    with copies.beside() as found:
        assert [one.device.type for one in found] == ["meta", "cpu", "cpu", "cpu"]


def test_a_snapshot_that_went_to_the_host_is_not_packed_ahead() -> None:
    class Gone(Copies):
        on_device = False

    snapshot = FullSnapshot(["w"], Gone([torch.ones(2)], CPU), 0)
    state, made = snapshot.unload(lambda _: pytest.fail("it is sent from the host"))
    assert made is None and state.adapter == {"w": on_host(torch.ones(2))}


def test_copies_go_once_they_were_used_but_for_what_somebody_has_of_them() -> None:
    copies = Copies([torch.ones(2), torch.ones(2)], CPU)
    with copies.beside() as found:
        kept, gone = found[0], weakref.ref(found[1])
    del found
    assert gone() is None and kept.tolist() == [1, 1]


def test_a_thread_is_on_the_device_of_the_copies_before_it_is_on_a_stream_and_leaves_in_that_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a device: what is entered and left is all that can be seen. A thread that leaves a stream for
    that of another device makes its process have memory there."""
    seen: list[str] = []

    @contextmanager
    def entered(kind: str, what: object) -> Iterator[None]:
        seen.append(f"{kind} {what}")
        yield
        seen.append(f"no {kind}")

    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda: None))
    monkeypatch.setattr(torch.cuda, "device", partial(entered, "device"))
    monkeypatch.setattr(torch.cuda, "stream", lambda _: entered("stream", "beside"))
    stream = SimpleNamespace(
        wait_event=lambda _: seen.append("wait"), synchronize=lambda: seen.append("done")
    )
    monkeypatch.setattr(transfer, "side_stream", lambda device: nullcontext(stream))
    monkeypatch.setattr(Copies, "on_device", True)
    with Copies([torch.ones(2)], torch.device("cuda", 1)).beside():
        seen.append("work")
    assert seen == [
        *("device cuda:1", "stream beside", "wait"),
        "work",
        *("done", "no stream", "no device"),
    ]


def test_ranks_that_take_none_have_none() -> None:
    assert FullSnapshot([], Copies([], torch.device("cpu")), 1).state().adapter == {}


def test_a_copy_has_room_beside_what_work_may_yet_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.trainer.compute.memory.room.gpu_memory", lambda: 100)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 40)
    assert has_room(20, 40, "cuda:0") and not has_room(21, 40, "cuda:0") and not has_room(20, 41, "cuda:0")
    assert has_room(10**15, 10**15, "cpu"), "there is no other place for it"
