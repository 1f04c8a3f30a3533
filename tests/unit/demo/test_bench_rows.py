"""The arithmetic of the benchmark, and what it reports."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import bench.__main__ as program
from bench import exactness, latency, throughput, waiting
from bench.stack import Row, alternate, next_token_datum, random_tokens
from tinsmith.v1 import tinker_pb2


def test_sides_are_measured_in_turn() -> None:
    calls: list[str] = []

    def side(name: str) -> float:
        calls.append(name)
        return float(len(calls))

    ours, bare = alternate(2, lambda n: side(f"ours-{n}"), lambda n: side(f"bare-{n}"))
    assert calls == ["ours-0", "bare-0", "ours-1", "bare-1"]
    assert (ours, bare) == ([1.0, 3.0], [2.0, 4.0])


def test_one_slow_repetition_does_not_move_the_ratio() -> None:
    row = throughput._row("sampling", ours=[4.0, 4.0, 0.4], bare=[2.0, 2.0, 20.0], tokens=100)
    assert row.value == 0.5
    assert (row.details["lowest_ratio"], row.details["highest_ratio"]) == (0.5, 50.0)
    assert (row.details["ours_tokens_per_s"], row.details["bare_tokens_per_s"]) == (25.0, 50.0)


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
    assert Row("difference", value, "nats", bound=1e-5).holds is holds


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
    rows = [Row("a", 2e-5, "nats", bound=1e-5), Row("b", 0.7, "x tokens/s", details={"ours": 7})]
    path = program.save("here", rows, 12.3)
    report = json.loads(path.read_text())
    assert path == tmp_path / "bench" / "results" / "here.json"
    assert [row["holds"] for row in report["rows"]] == [False, True]
    assert report["rows"][1]["details"] == {"ours": 7}
    assert report["machine"]["cores"] >= 1
    assert report["machine"]["commit"] is None
