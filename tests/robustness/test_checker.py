"""The checker finds what it is there to find."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from tests.robustness import faults
from tests.robustness.checker import Stored, Verdict, judge, judge_refusals, judge_samples
from tests.robustness.history import Entry, History
from tests.robustness.report import Report

EXPECTED: list[dict[str, Any]] = [{}, {"loss": 2.5, "logprobs": "ab"}, {"grad_norm": 1.0}, {"weights": "w3"}]


def answered(kind: str, result: dict[str, Any], **arguments: Any) -> Entry:
    return Entry(kind, arguments, 0.0, 1.0, result)


def history() -> History:
    found = History("client", "s:train:0")
    found.training = [
        answered("create", {}),
        answered("forward_backward", {"loss": 2.5, "logprobs": "ab"}),
        answered("step", {"grad_norm": 1.0}),
        answered("publish", {}),
    ]
    return found


def stored(**changes: Any) -> Stored:
    return Stored(**{"weights": {3: "w3"}, "futures": dict.fromkeys(range(4), "done")} | changes)


def verdict(found: History | None = None, kept: Stored | None = None) -> Verdict:
    return judge(found or history(), EXPECTED, kept or stored())


def test_an_undisturbed_history_is_right() -> None:
    assert verdict() == Verdict(4)


def test_a_request_without_a_result_is_lost() -> None:
    found = history()
    found.training[2].result, found.training[2].error = None, "RequestFailedError: gone"
    assert "gone" in verdict(found).lost[0]


def test_a_batch_that_was_refused_memory_is_answered_and_nothing_else_may_have_been() -> None:
    found = history()
    found.training[1].result, found.training[1].refused = {}, True
    judged = judge(found, [EXPECTED[0], {}, *EXPECTED[2:]], stored())
    assert (judged.lost, judged.wrong, judged.refused) == ([], [], 1)
    assert judge_refusals(judged.refused, lacks=1).wrong == []
    assert "2 requests were refused memory" in judge_refusals(2, lacks=1).wrong[0]


def test_a_norm_of_several_ranks_may_differ_in_its_last_bits_and_nothing_else_may() -> None:
    found = history()
    found.training[2].result = {"grad_norm": 1.0 + 2**-51}
    assert judge(found, EXPECTED, stored(), ranks=2).wrong == []
    assert len(judge(found, EXPECTED, stored()).wrong) == 1
    found.training[2].result = {"grad_norm": 1.0 + 2**-49}
    assert len(judge(found, EXPECTED, stored(), ranks=2).wrong) == 1
    found.training[1].result = {"loss": 2.5 + 2**-51, "logprobs": "ab"}
    assert len(judge(found, EXPECTED, stored(), ranks=2).wrong) == 2


def test_a_result_that_differs_in_the_last_bit_is_wrong() -> None:
    found = history()
    found.training[1].result = {"loss": 2.5000000000000004, "logprobs": "ab"}
    assert len(verdict(found).wrong) == 1


def test_weights_that_differ_are_wrong_although_every_answer_was_right() -> None:
    assert "other weights" in verdict(kept=stored(weights={3: "twice"})).wrong[0]


def test_a_snapshot_that_is_missing_is_lost_and_one_too_many_is_wrong() -> None:
    found = verdict(kept=stored(weights={4: "w3"}))
    assert (len(found.lost), len(found.wrong)) == (1, 1)


def test_a_future_that_is_pending_or_missing_is_lost_and_one_too_many_is_wrong() -> None:
    futures = {0: "done", 1: "pending", 2: "done", 9: "done"}
    found = verdict(kept=stored(futures=futures))
    assert (len(found.lost), len(found.wrong)) == (2, 1)


def test_equal_samples_must_have_equal_tokens_and_close_log_probabilities() -> None:
    def sample(tokens: list[int], logprob: float, source: str = "m@3") -> Entry:
        return answered("sample", {"tokens": tokens, "logprobs": [logprob]}, source=source, seed=1)

    same = [sample([5], -1.0), sample([5], -1.0 + 1e-6), sample([7], -1.0, source="m@6")]
    assert judge_samples(same).wrong == []
    assert len(judge_samples([*same, sample([6], -1.0)]).wrong) == 1
    assert len(judge_samples([*same, sample([5], -1.1)]).wrong) == 1


def test_a_client_that_trains_is_served_when_its_training_is_whatever_it_samples_meanwhile() -> None:
    found = history()
    for entry in found.training:
        entry.submitted = 1.0
    late = answered("sample", {"tokens": [], "logprobs": []})
    late.submitted = 3.0
    found.samples.append(late)
    assert found.served_after(2.0) is None
    found.training += [
        Entry("step", {}, 3.0, 4.0, {}),
        Entry("step", {}, 3.5, 5.0, {}),
        Entry("step", {}, 6.0),
    ]
    assert found.served_after(2.0) == 4.0
    assert found.served_after(3.2) == 5.0
    assert found.served_after(5.0) is None


def test_faults_amid_others_count_and_are_timed_apart() -> None:
    one, other = Report(requests=5), Report(requests=7)
    one.note("gone", 1.0, amid=False)
    one.note("gone", 9.0, amid=True)
    other.note("gone", 3.0, amid=False)
    other.note("slow", 8.0, amid=True)
    one.add(other)
    assert one.injected == 4
    assert "| gone | 2 | 2.0 | 3.0 | 1 | 9.0 | 0 | 0 |" in one.markdown()
    assert "| slow | 0 |  |  | 1 | 8.0 | 0 | 0 |" in one.markdown()


def test_only_trainer_faults_are_followed_by_others_and_those_are_taken_evenly() -> None:
    chosen = [faults.ALL["sampler: SIGKILL"], *[faults.ALL["trainer: SIGTERM"]] * 20]
    alone, *groups = faults.grouped(chosen, 3, random.Random(1))
    assert alone == chosen[:1]
    strikers = Counter(fault.name for group in groups for fault in group[1:])
    assert sum(strikers.values()) == 60
    assert {faults.ALL[name].part for name in strikers} >= {"gateway", "sampler", "redis", "sdk", "state"}
    assert not any("power cut" in name for name in strikers)
    assert max(strikers.values()) - min(strikers.values()) <= 1
