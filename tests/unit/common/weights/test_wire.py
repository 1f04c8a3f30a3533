"""The weight wire: packing, and broadcasts between real processes over gloo and Redis."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.synchronize import Event

import pytest
import torch

from services.common import weights
from services.common.state import keys
from services.common.state.redis_client import connect_sync
from services.common.weights import base, membership, nccl
from services.common.weights import within as within_module
from services.common.weights.store import RedisStore
from services.common.weights.within import within


def adapter(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model.layers.0.self_attn.q_proj.lora_A": torch.randn(3, 7, generator=generator),
        "model.layers.0.self_attn.q_proj.lora_B": torch.randn(5, 3, generator=generator).to(torch.bfloat16),
        "lm_head.lora_A": torch.randn(1, 1, generator=generator),
    }


def test_unpacking_a_packed_buffer_gives_the_same_bits() -> None:
    tensors = adapter(0)
    buffer, specs = weights.pack(tensors)
    assert buffer.dtype == torch.uint8
    assert buffer.numel() == weights.nbytes(specs)
    unpacked = weights.unpack(buffer, specs)
    assert list(unpacked) == list(tensors)
    for name, tensor in tensors.items():
        assert unpacked[name].dtype == tensor.dtype
        assert torch.equal(unpacked[name], tensor)


def test_a_buffer_of_another_size_is_refused() -> None:
    buffer, specs = weights.pack(adapter(0))
    with pytest.raises(ValueError, match="bytes"):
        weights.unpack(buffer[:-1], specs)


def test_one_flipped_bit_changes_the_checksum() -> None:
    buffer, _ = weights.pack(adapter(0))
    damaged = buffer.clone()
    damaged[3] ^= 1
    assert weights.checksum(buffer) == weights.checksum(buffer.clone())
    assert weights.checksum(buffer) != weights.checksum(damaged)


def receive(
    redis_url: str, epoch: int, rank: int, world: int, size: int, results: multiprocessing.Queue, over: Event
) -> None:
    group = weights.join("org/model", epoch, rank, world, "cpu", redis_url, 120)
    buffer, checksum = group.receive(size, 120)
    assert weights.checksum(buffer) == checksum
    results.put((rank, checksum))
    # Another one may still be connecting to this one.
    assert over.wait(240)


def test_every_receiver_gets_the_senders_bytes(redis_url: str) -> None:
    buffer, specs = weights.pack(adapter(1))
    context = multiprocessing.get_context("spawn")
    results, over = context.Queue(), context.Event()
    size = weights.nbytes(specs)
    children = [
        context.Process(target=receive, args=(redis_url, 11, rank, 3, size, results, over)) for rank in (1, 2)
    ]
    for child in children:
        child.start()
    group = weights.join("org/model", 11, 0, 3, "cpu", redis_url, 120)
    group.broadcast_buckets(buffer.split(base.BUCKET_BYTES), 120)
    received = dict(results.get(timeout=120) for _ in children)
    over.set()
    assert received == {1: weights.checksum(buffer), 2: weights.checksum(buffer)}
    for child in children:
        child.join(60)
        assert child.exitcode == 0


def joined_pair(redis_url: str, epoch: int, timeout: float) -> list[weights.WeightGroup]:
    with ThreadPoolExecutor(2) as pool:
        joins = [
            pool.submit(weights.join, "org/model", epoch, rank, 2, "cpu", redis_url, timeout)
            for rank in (0, 1)
        ]
        return [join.result(timeout=120) for join in joins]


def assert_arrived(received: tuple[torch.Tensor, int], sent: torch.Tensor) -> None:
    buffer, checksum = received
    assert torch.equal(buffer, sent)
    assert checksum == weights.checksum(sent)


def test_a_buffer_larger_than_a_bucket_arrives_whole(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "BUCKET_BYTES", 1000)
    sender, receiver = joined_pair(redis_url, 12, 30)
    buffer = torch.randint(0, 255, (4321,), dtype=torch.uint8)
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(receiver.receive, buffer.numel(), 30)
        sender.broadcast_buckets(buffer.split(base.BUCKET_BYTES), 30)
        assert_arrived(received.result(timeout=120), buffer)


@pytest.mark.parametrize("bucket_bytes", [4, 16, 100, 1 << 20])
def test_a_stream_has_the_bytes_and_the_checksum_of_the_packed_buffer(
    monkeypatch: pytest.MonkeyPatch, bucket_bytes: int
) -> None:
    monkeypatch.setattr(base, "BUCKET_BYTES", bucket_bytes)
    buffer, specs = weights.pack(adapter(2))
    stream = adapter(2)
    assert weights.specs_of(stream) == specs
    sizes, pieces = [], []
    for bucket in weights.buckets(stream):
        sizes.append(bucket.numel())
        pieces.append(bucket.clone())
    assert torch.equal(torch.cat(pieces), buffer)
    assert weights.stream_checksum(stream) == weights.checksum(buffer)
    assert set(sizes[:-1]) <= {bucket_bytes} and sizes[-1] <= bucket_bytes


def test_a_bucket_within_a_tensor_is_no_copy_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "BUCKET_BYTES", 64)
    large = torch.randn(40)
    sent = list(weights.buckets({"small": torch.randn(3), "large": large}))
    inside = range(large.data_ptr(), large.data_ptr() + large.nbytes)
    assert [bucket.data_ptr() in inside for bucket in sent] == [False, True, True]


def test_a_stream_is_received_like_a_buffer_and_may_be_discarded(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "BUCKET_BYTES", 48)
    sender, receiver = joined_pair(redis_url, 17, 30)
    stream = adapter(3)
    buffer, specs = weights.pack(adapter(3))
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(receiver.receive, buffer.numel(), 30)
        sender.broadcast_buckets(weights.buckets(stream), 30)
        assert_arrived(received.result(timeout=120), buffer)
        discarded = pool.submit(receiver.discard, weights.nbytes(specs), 30)
        sender.broadcast_buckets(weights.buckets(stream), 30)
        discarded.result(timeout=120)
        # Nothing of it is left on the wire.
        received = pool.submit(receiver.receive, 32, 30)
        sender.broadcast_buckets([torch.full((32,), 7, dtype=torch.uint8)], 30)
        assert received.result(timeout=120)[0].tolist() == [7] * 32


def test_a_receiver_whose_sender_is_silent_gives_up_at_its_deadline(redis_url: str) -> None:
    _sender, receiver = joined_pair(redis_url, 13, 30)
    started = time.monotonic()
    with pytest.raises(RuntimeError):
        receiver.receive(16, 1.0)
    assert time.monotonic() - started < 20


def test_joining_alone_gives_up_at_its_deadline(redis_url: str) -> None:
    with pytest.raises(RuntimeError):
        weights.join("org/model", 14, 0, 2, "cpu", redis_url, 1.0)


def test_who_joins_in_vain_is_told_who_did_not_come(redis_url: str) -> None:
    with ThreadPoolExecutor(2) as pool:
        came = [pool.submit(weights.join, "org/model", 18, rank, 4, "cpu", redis_url, 1.0) for rank in (0, 2)]
        for join in came:
            with pytest.raises(weights.NotMet, match="rank 1, 3 did not come") as caught:
                join.result(timeout=120)
            assert caught.value.absent == (1, 3)


def test_a_member_that_comes_and_goes_before_the_medium_is_there_costs_no_more_than_the_deadline(
    redis_url: str,
) -> None:
    RedisStore(connect_sync(redis_url), keys.weight_store("org/model", 19), 5).set("here/1", b"1")
    with pytest.raises(RuntimeError):
        weights.join("org/model", 19, 0, 2, "cpu", redis_url, 1.5)


@pytest.mark.parametrize("theirs", ["0", None])
def test_a_group_over_nccl_is_watched_by_nobody_who_would_end_the_process_and_others_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch, theirs: str | None
) -> None:
    setting = "TORCH_NCCL_BLOCKING_WAIT"
    if theirs is None:
        monkeypatch.delenv(setting, raising=False)
    else:
        monkeypatch.setenv(setting, theirs)
    with pytest.raises(RuntimeError, match="no device"), nccl._errors_are_ours():
        assert os.environ[setting] == "1"
        raise RuntimeError("no device")
    assert os.environ.get(setting) == theirs


class Recorded(weights.WeightGroup):
    """A medium that writes down how long it may take, and takes no time."""

    def __init__(self, now: list[float], seconds: float = 0.0) -> None:
        super().__init__(1, 0)
        self.limits: list[float] = []
        self._now, self._seconds = now, seconds

    def _broadcast_bucket(self, bucket: torch.Tensor, timeout: float, arrived: base.Arrived) -> None:
        self.limits.append(timeout)
        self._now[0] += self._seconds

    def _abort_medium(self) -> None:
        pass


@pytest.mark.parametrize("way", ["broadcast_buckets", "receive", "discard"])
def test_a_bucket_has_the_deadline_of_its_own_bytes_and_all_of_them_the_deadline_that_was_given(
    monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(base, "BUCKET_BYTES", 4000)
    monkeypatch.setattr(base, "SLOWEST_BYTES_PER_S", 1000.0)
    now = [100.0]
    monkeypatch.setattr(base.time, "monotonic", lambda: now[0])

    def transfer(group: weights.WeightGroup, seconds: float) -> None:
        buckets = torch.zeros(10_000, dtype=torch.uint8).split(base.BUCKET_BYTES)
        getattr(group, way)(buckets if way == "broadcast_buckets" else 10_000, seconds)

    group = Recorded(now)
    transfer(group, 300.0)
    assert group.limits == [14.0, 14.0, 12.0]
    group = Recorded(now, seconds=9.0)
    transfer(group, 20.0)
    assert group.limits == [14.0, 11.0, 2.0]
    with pytest.raises(TimeoutError, match="took too long"):
        transfer(Recorded(now, seconds=9.0), 18.0)


def test_a_member_that_comes_no_further_than_the_meeting_costs_no_more_than_the_deadline(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()

    class Waits(Recorded):
        """As a communicator that is made waits for a rank that does not connect."""

        def _broadcast_bucket(self, bucket: torch.Tensor, timeout: float, arrived: base.Arrived) -> None:
            assert ended.wait(60)

        def _abort_medium(self) -> None:
            assert ended.wait(60)

    monkeypatch.setattr(membership, "_group", lambda *_: Waits([0.0]))
    monkeypatch.setattr(membership, "_ABORT_S", 0.1)
    RedisStore(connect_sync(redis_url), keys.weight_store("org/model", 20), 5).set("here/1", b"1")
    try:
        with pytest.raises(TimeoutError, match="no greeting in weight group 20 within"):
            weights.join("org/model", 20, 0, 2, "cpu", redis_url, 0.5)
    finally:
        ended.set()


def test_of_what_never_comes_back_there_is_only_so_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(within_module, "MOST_LEFT_BEHIND", 2)
    monkeypatch.setattr(within_module, "_left_behind", set())
    ended, began = threading.Event(), []

    def hangs() -> None:
        began.append(1)
        assert ended.wait(60)

    for _ in range(2):
        with pytest.raises(TimeoutError, match="no end of it within"):
            within(0.01, "end of it", hangs)
    with pytest.raises(TimeoutError, match="2 others never came back"):
        within(60, "end of it", hangs)
    assert len(began) == 2
    ended.set()
    while not all(one.done() for one in within_module._left_behind):
        time.sleep(0.001)
    assert within(60, "sum", lambda: 1 + 1) == 2


def test_an_error_that_comes_in_time_is_the_work_s_own() -> None:
    def fails() -> None:
        raise TimeoutError("of the medium")

    with pytest.raises(TimeoutError, match="of the medium"):
        within(60, "greeting", fails)


def test_an_aborted_group_sends_and_receives_nothing_more(redis_url: str) -> None:
    sender, receiver = joined_pair(redis_url, 15, 30)
    receiver.abort()
    sender.abort()
    with pytest.raises(RuntimeError, match="given up"):
        receiver.receive(16, 30)
    with pytest.raises(RuntimeError, match="given up"):
        sender.broadcast_buckets([torch.zeros(16, dtype=torch.uint8)], 30)


def test_the_rendezvous_of_a_group_expires(redis_url: str) -> None:
    joined_pair(redis_url, 16, 30)
    ttl = connect_sync(redis_url).ttl(keys.weight_store("org/model", 16))
    assert 0 < ttl <= 3600
