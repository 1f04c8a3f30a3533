"""The arithmetic of the benchmark, and what it reports."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import bench.__main__ as program
from bench.counted import loss_memory
from bench.requests import cost, latency, recorder, waiting
from bench.rows import Row, alternate, ratio_row
from bench.sampling import publishing, raw_broadcast
from bench.sampling import throughput as sampling
from bench.stack import next_token_datum, random_tokens
from bench.training import exactness
from bench.training.bare_engine import _pass, _together
from services.trainer.compute.data import PassOp
from tinsmith.internal.v1 import tinker_pb2


def test_sides_are_measured_in_turn() -> None:
    calls: list[str] = []

    def side(name: str) -> float:
        calls.append(name)
        return float(len(calls))

    ours, bare = alternate(2, lambda n: side(f"ours-{n}"), lambda n: side(f"bare-{n}"))
    assert calls == ["ours-0", "bare-0", "ours-1", "bare-1"]
    assert (ours, bare) == ([1.0, 3.0], [2.0, 4.0])


def test_one_slow_repetition_does_not_move_the_ratio() -> None:
    row = ratio_row("sampling", ours=[4.0, 4.0, 0.4], bare=[2.0, 2.0, 20.0], tokens=100, at_least=0.5)
    assert row.value == 0.5
    assert row.holds
    assert (row.details["lowest_ratio"], row.details["highest_ratio"]) == (0.5, 50.0)
    assert (row.details["ours_tokens_per_s"], row.details["bare_tokens_per_s"]) == (25.0, 50.0)


def test_a_process_is_charged_for_the_time_that_it_had_a_core_not_for_what_passed() -> None:
    row = cost.cost_row("gateway", spent=[1.0, 0.5, 4.0], elapsed=[50.0, 40.0, 90.0], at_least=1000.0)
    assert (row.value, row.holds) == (2000.0, True)
    assert (row.details["lowest"], row.details["highest"]) == (500.0, 4000.0)
    assert (row.details["core_ms_per_sample"], row.details["samples_per_s_on_this_machine"]) == (0.5, 40.0)


def test_what_the_sdk_sent_is_sent_again_with_another_body() -> None:
    first = b"POST /api/v1/asample HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nX-API-Key: k\r\n\r\nabc"
    second = b"POST /api/v1/retrieve_future HTTP/1.1\r\ncontent-length: 2\r\n\r\nde"
    unfinished = second[:-1]
    one, other = recorder.requests_in(first + second + unfinished)
    assert (one.path, one.body, other.path, other.body) == ("asample", b"abc", "retrieve_future", b"de")
    head, body = one.with_body(b"longer")
    assert head.endswith(b"\r\nX-API-Key: k\r\ncontent-length: 6\r\n\r\n")
    assert recorder.requests_in(head + body)[0].body == b"longer"


def test_the_largest_difference_is_found_and_not_a_number_is_infinite() -> None:
    left = [np.array([0.0, 1.0]), np.array([2.0])]
    assert exactness.max_difference(left, [np.array([0.0, 1.5]), np.array([2.25])]) == 0.5
    assert exactness.max_difference(left, [np.array([0.0, np.nan]), np.array([2.0])]) == float("inf")


def test_a_few_slow_heartbeats_do_not_move_the_95th_percentile_and_a_tenth_does() -> None:
    assert waiting._p95_ms([0.002] * 97 + [0.4] * 3) == pytest.approx(2.0)
    assert waiting._p95_ms([0.002] * 90 + [0.4] * 10) == pytest.approx(400.0)


@pytest.mark.parametrize(
    ("value", "holds"), [(1e-6, True), (1e-5, True), (2e-5, False), (float("inf"), False)]
)
def test_a_row_holds_up_to_its_bound(value: float, holds: bool) -> None:
    assert Row("difference", value, "nats", at_most=1e-5).holds is holds


@pytest.mark.parametrize(("value", "holds"), [(0.9, True), (1.2, True), (0.89, False), (float("nan"), False)])
def test_a_row_holds_from_its_floor_upwards(value: float, holds: bool) -> None:
    row = Row("ratio", value, "x", at_least=0.9)
    assert row.holds is holds
    assert program.target(row) == ("≥ 0.9 met" if holds else "≥ 0.9 MISSED")


def test_what_the_stack_adds_is_the_difference_of_the_medians() -> None:
    assert latency.small_forward_row([0.02, 0.03, 9.0], [0.01, 0.01, 0.01]).value == pytest.approx(20.0)
    assert sampling.one_token_row([0.05, 0.04, 0.06], [0.03, 0.04, 0.03]).value == pytest.approx(20.0)


def test_a_publish_may_take_twice_the_broadcast_and_150_ms() -> None:
    row = publishing.first_token_row([0.2, 0.21, 0.9], raw=0.04, wire_bytes=8, receivers=1)
    assert row.value == pytest.approx(130.0)
    assert row.holds
    assert not publishing.first_token_row([0.3], raw=0.04, wire_bytes=8, receivers=1).holds


def test_the_loss_is_measured_in_copies_of_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = 4 * loss_memory.POSITIONS * loss_memory.VOCAB
    peaks = {"ours": copy // 2, "naive": 3 * copy}
    monkeypatch.setattr(loss_memory, "_in_a_process", peaks.__getitem__)
    (row,) = loss_memory.measure()
    assert (row.value, row.holds) == (0.5, True)
    assert row.details["ours_over_naive"] == pytest.approx(1 / 6, abs=1e-3)


def test_the_bare_engine_gets_the_batch_in_the_trainers_units() -> None:
    work = _pass(PassOp("m", 1, "cross_entropy"), [[1, 2, 3]] * 3000)
    assert [len(batch.rows) for batch in work.micro_batches] == [3000]
    work = _pass(PassOp("m", 1, "cross_entropy"), [list(range(4097))] * 3)
    assert [len(batch.rows) for batch in work.micro_batches] == [3]
    work = _pass(PassOp("m", 1, "cross_entropy"), [list(range(4097))] * 3, shared=False)
    assert [len(batch.rows) for batch in work.micro_batches] == [2, 1]
    row = work.micro_batches[1].rows[0]
    targets = np.frombuffer(row.loss_inputs["target_tokens"].data, "<i8")
    assert (row.index, row.length, targets[0], targets[-1]) == (2, 4096, 1, 4096)


def test_the_bare_engine_gets_small_batches_of_several_models_as_one_micro_batch() -> None:
    work = _together([_pass(PassOp(f"m{n}", 1, "cross_entropy"), [[n, 2, 3], [n, 4]]) for n in range(3)])
    assert [op.model_id for op in work.ops] == ["m0", "m1", "m2"]
    (batch,) = work.micro_batches
    assert [(row.op, work.ops[row.op].model_id, row.index) for row in batch.rows] == [
        (n, f"m{n}", index) for n in range(3) for index in range(2)
    ]


def test_two_processes_broadcast_the_bytes() -> None:
    assert 0 < raw_broadcast.seconds(1 << 16) < 60


def test_the_newest_snapshot_is_the_highest_number_not_the_last_name(tmp_path: Path) -> None:
    for name in ("9", "10", "2", "11.tmp"):
        (tmp_path / "snapshots" / "m" / name).mkdir(parents=True)
    assert exactness.newest_snapshot(tmp_path, "m").name == "10"


def test_random_tokens_stay_in_the_vocabulary_and_repeat_with_their_seed() -> None:
    first, second = (random_tokens(np.random.default_rng(1), 7, 3, 50) for _ in range(2))
    assert first == second
    assert {token for row in first for token in row} == set(range(7))


def test_every_token_after_the_first_is_a_target() -> None:
    datum = next_token_datum([5, 6, 7])
    assert datum.model_input.to_ints() == [5, 6]
    assert datum.loss_fn_inputs["target_tokens"].to_numpy().tolist() == [6, 7]
    assert datum.loss_fn_inputs["weights"].to_numpy().tolist() == [1.0, 1.0]


def test_the_posted_message_is_the_one_the_sdk_would_send() -> None:
    body = latency._forward_backward("s:train:0", 3, np.array([5, 6, 7], dtype=np.int32))
    message = tinker_pb2.TinkerForwardBackwardRequest.FromString(body)
    (datum,) = message.data
    assert (message.model_id, message.seq_id, message.loss_fn) == ("s:train:0", 3, "cross_entropy")
    assert np.frombuffer(datum.model_input[0].encoded_text.tokens, "<i4").tolist() == [5, 6]
    assert np.frombuffer(datum.loss_fn_inputs["target_tokens"].dense, "<i8").tolist() == [6, 7]
    assert np.frombuffer(datum.loss_fn_inputs["weights"].dense, "<f4").tolist() == [1.0, 1.0]


def test_results_are_saved_with_the_machine_and_whether_each_row_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "ROOT", tmp_path)
    rows = [Row("a", 2e-5, "nats", at_most=1e-5), Row("b", 0.7, "x tokens/s", details={"ours": 7})]
    path = program.save("here", rows, 12.3)
    report = json.loads(path.read_text())
    assert path == tmp_path / "bench" / "results" / "here.json"
    assert [row["holds"] for row in report["rows"]] == [False, True]
    assert report["rows"][1]["details"] == {"ours": 7}
    assert report["machine"]["cores"] >= 1
    assert report["machine"]["commit"] is None
