"""Ranks say whether they have the memory for a sequence that they compute together, before they begin."""

from __future__ import annotations

import numpy as np
import pytest

from services.trainer.compute import exchange
from services.trainer.compute.data import Failure, MicroBatch, Pass, PassOp, Row
from services.trainer.compute.logprobs import CHUNK_ELEMENTS
from services.trainer.compute.memory import machine, room
from services.trainer.compute.memory.capacity import GIB, Footprint, capacity, head_bytes, needed
from services.trainer.compute.memory.room import longest_split, without_room

TAKEN = Footprint(weights=2 * GIB, token=1e5, exchange=2e4)
VOCAB = 1000


def row(op: int, length: int) -> Row:
    return Row(op, 0, np.zeros(length, "<i4").tobytes(), {})


def plan(*rows: tuple[int, int, bool]) -> Pass:
    """Of (operation, tokens, split), each a micro-batch."""
    ops = [PassOp(name, 1, "cross_entropy") for name in "abc"]
    return Pass(ops, [MicroBatch([row(op, length)], split) for op, length, split in rows])


def told(monkeypatch: pytest.MonkeyPatch, free: int, ranks: int, others: list[int] | None = None) -> None:
    """This rank has so much free; another one says these numbers."""
    monkeypatch.setattr(room.dist, "get_world_size", lambda: ranks)
    monkeypatch.setattr(room, "free_memory", lambda device: free)
    monkeypatch.setattr(room, "meet", lambda device: None)
    monkeypatch.setattr(
        room, "least", lambda mine, device: [min(pair) for pair in zip(mine, others or mine, strict=True)]
    )


def test_only_the_longest_sequence_that_all_ranks_compute_counts() -> None:
    work = plan((0, 50, True), (0, 70, True), (0, 900, False), (1, 800, False), (2, 60, True))
    assert longest_split(work, {}) == {0: 70, 2: 60}
    assert longest_split(work, {0: Failure("server", "internal", "")}) == {2: 60}


@pytest.mark.parametrize("memory", [2 * GIB + GIB // 2, 16 * GIB])
@pytest.mark.parametrize("context", [4096, 131_072, 10**9])
@pytest.mark.parametrize("vocab_size", [1, 256, 1000, 32_000, 151_936])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_what_was_promised_at_the_start_is_not_refused_while_its_memory_is_free(
    ranks: int, vocab_size: int, context: int, memory: int
) -> None:
    for token in (1e3, 1e5, 1e6):
        taken = Footprint(weights=GIB, token=token, exchange=token / 5)
        for micro_batch in (1, 1024, 8192, 10**6):
            found = capacity(memory, GIB, taken, context, vocab_size, micro_batch, ranks)
            beside = memory - taken.weights - GIB // 2 - found.adapter_bytes
            need = needed(taken, found.sequence_tokens, vocab_size, ranks)
            assert need <= beside
            if found.sequence_tokens < context:
                # Nor does it promise much less than there is: at most what logits of one chunk take.
                assert need > 0.99 * (beside - head_bytes(CHUNK_ELEMENTS, 1))


def test_more_ranks_need_less_each() -> None:
    several = [needed(TAKEN, 100_000, VOCAB, ranks) for ranks in (2, 4, 8)]
    assert several == sorted(several, reverse=True)


def test_an_operation_fails_for_which_this_rank_lacks_memory_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told(monkeypatch, free=needed(TAKEN, 5000, VOCAB, 2), ranks=2)
    found = without_room(plan((0, 5001, True), (1, 90_000, False), (2, 5000, True)), {}, TAKEN, VOCAB, "cpu")
    assert found.keys() == {0}
    assert (found[0].category, found[0].code) == ("server", "out_of_memory")
    assert "5001 tokens" in found[0].message and "send shorter data" in found[0].message


def test_all_fail_it_when_one_lacks_memory_or_a_token_takes_more_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work, need = plan((0, 5000, True)), needed(TAKEN, 5000, VOCAB, 2)
    told(monkeypatch, free=2 * need, ranks=2, others=[2 * need, -need])
    assert without_room(work, {}, TAKEN, VOCAB, "cpu") == {}
    for others in ([need - 1, -need], [2 * need, -2 * need - 1]):
        told(monkeypatch, free=2 * need, ranks=2, others=others)
        assert without_room(work, {}, TAKEN, VOCAB, "cpu").keys() == {0}


def test_no_rank_looks_at_what_is_free_before_all_have_given_back_what_they_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told(monkeypatch, free=GIB, ranks=2)
    order: list[str] = []
    monkeypatch.setattr(room, "free_cache", lambda: order.append("gives back"))
    monkeypatch.setattr(room, "meet", lambda device: order.append("meets"))
    monkeypatch.setattr(room, "free_memory", lambda device: order.append("looks") or GIB)
    without_room(plan((0, 5000, True)), {}, TAKEN, VOCAB, "cpu")
    assert order == ["gives back", "meets", "looks"]


def test_a_pass_without_such_sequences_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "free_memory", lambda device: pytest.fail("nobody is asked"))
    assert without_room(plan((0, 5000, False)), {}, TAKEN, VOCAB, "cpu") == {}


def test_one_rank_is_told_its_own_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange.dist, "get_world_size", lambda: 1)
    assert exchange.least([3, -4], "cpu") == [3, -4]


def test_ranks_share_the_memory_of_their_own_machine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "free_machine_memory", lambda: 24 * GIB)
    monkeypatch.setattr(machine.dist, "get_world_size", lambda: 8)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert room.free_memory("cpu") == 3 * GIB
    # Four machines of two ranks each.
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert room.free_memory("cpu") == 12 * GIB
    monkeypatch.setattr(machine, "machine_memory", lambda: 32 * GIB)
    assert machine.own_memory("cpu") == 12 * GIB


def test_a_rank_keeps_to_its_share_of_a_gpu_and_to_what_others_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = machine.torch.cuda
    monkeypatch.setattr(cuda, "memory_reserved", lambda: 10 * GIB)
    monkeypatch.setattr(cuda, "memory_allocated", lambda: 8 * GIB)
    monkeypatch.setattr(room, "free_cache", lambda: None)

    def has(free: int, share: float) -> tuple[int, int]:
        monkeypatch.setattr(cuda, "mem_get_info", lambda: (free * GIB, 80 * GIB))
        monkeypatch.setattr(cuda, "get_per_process_memory_fraction", lambda: share)
        return machine.own_memory("cuda:0") // GIB, room.free_memory("cuda:0") // GIB

    # The other has not come yet; it has; nobody else is there.
    assert has(70, 0.5) == (40, 32)
    assert has(20, 0.5) == (30, 22)
    assert has(70, 1.0) == (80, 72)
