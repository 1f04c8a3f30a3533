"""Flat tensors that are used again."""

from __future__ import annotations

from services.trainer.compute.memory.buffers import FlatBuffers


def test_a_tensor_is_used_again_by_one_user_at_a_time() -> None:
    buffers = FlatBuffers()
    first = buffers.take(10, "cpu")
    buffers.give(first)
    again, other = buffers.take(10, "cpu"), buffers.take(10, "cpu")
    assert again.data_ptr() == first.data_ptr() != other.data_ptr()
    assert buffers.take(11, "cpu").shape == (11,)


def test_one_device_is_given_nothing_of_another() -> None:
    buffers = FlatBuffers()
    buffers.give(buffers.take(10, "meta"))
    assert buffers.take(10, "cpu").device.type == "cpu"
    assert buffers.take(10, "meta").device.type == "meta"


def test_of_what_lies_unused_the_stalest_gives_way() -> None:
    buffers = FlatBuffers(kept_bytes=100)
    large, first, second, third = (buffers.take(elements, "cpu") for elements in (26, 10, 11, 12))
    for tensor in (large, first, second):
        buffers.give(tensor)
    buffers.give(buffers.take(10, "cpu"))
    buffers.give(third)
    assert buffers.take(10, "cpu").data_ptr() == first.data_ptr(), "it was asked for since"
    assert buffers.take(12, "cpu").data_ptr() == third.data_ptr()
    assert buffers.take(11, "cpu").data_ptr() != second.data_ptr()
    assert buffers.take(26, "cpu").data_ptr() != large.data_ptr(), "it is more than may lie there"
