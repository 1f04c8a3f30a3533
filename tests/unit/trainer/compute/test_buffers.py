"""Flat tensors that are used again."""

from __future__ import annotations

from services.trainer.compute.optimizer import FlatBuffers


def test_a_tensor_is_used_again_by_one_user_at_a_time() -> None:
    buffers = FlatBuffers("cpu")
    first = buffers.take(10)
    buffers.give(first)
    again, other = buffers.take(10), buffers.take(10)
    assert again.data_ptr() == first.data_ptr() != other.data_ptr()
    assert buffers.take(11).shape == (11,)


def test_what_lies_unused_is_bounded() -> None:
    buffers = FlatBuffers("cpu", kept_bytes=100)
    large, small = buffers.take(26), buffers.take(20)
    for tensor in (large, small, buffers.take(20)):
        buffers.give(tensor)
    assert buffers.take(26).data_ptr() != large.data_ptr()
    assert buffers.take(20).data_ptr() == small.data_ptr()
    buffers.give(small)
    assert buffers.take(20).data_ptr() == small.data_ptr(), "taking makes room again"
