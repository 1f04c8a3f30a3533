"""Judges histories against the oracle: what was lost, what was done otherwise than once and in order.

Pure: plain data in, sentences out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.robustness.history import Entry, History

LOGPROB_TOLERANCE = 1e-4
NORMS, NORM_ULPS = ("grad_norm", "update_norm"), 4


@dataclass(frozen=True)
class Stored:
    """What the cluster holds of a model at the end.

    Attributes:
        weights: digest of the snapshot of each version.
        futures: state of the future of each seq_id that has one.
    """

    weights: Mapping[int, str]
    futures: Mapping[int, str]


@dataclass
class Verdict:
    """Sentences about requests that have no result (`lost`), and about effects that are not those of the
    same requests applied once each, in order (`wrong`). `refused`: requests that were refused memory."""

    requests: int = 0
    refused: int = 0
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def __add__(self, other: Verdict) -> Verdict:
        return Verdict(
            self.requests + other.requests,
            self.refused + other.refused,
            self.lost + other.lost,
            self.wrong + other.wrong,
        )


def judge(
    history: History, expected: Sequence[Mapping[str, Any]], stored: Stored | None, ranks: int = 1
) -> Verdict:
    """Judges one client.

    Args:
        expected: what the oracle, which is one rank, found for each training request.
        stored: of the client's model; None for one that only samples.
        ranks: of the trainer.
    """
    verdict = Verdict(
        len(history.training) + len(history.samples), sum(entry.refused for entry in history.training)
    )
    for seq_id, entry in enumerate(history.training):
        _judge_answer(verdict, f"{history.client} {entry.kind} {seq_id}", entry)
        if seq_id < len(expected):
            _judge_effect(verdict, history.client, seq_id, entry, expected[seq_id], ranks)
    for number, entry in enumerate(history.samples):
        _judge_answer(verdict, f"{history.client} sample {number}", entry)
    if stored is not None:
        _judge_stored(verdict, history, expected, stored)
    return verdict


def judge_refusals(refused: int, lacks: int) -> Verdict:
    """Where memory lacked so many times, no more requests may have been refused it: one that was under way
    alone each time, and none where it was a replay's, which is repeated."""
    wrong = f"{refused} requests were refused memory, which lacked {lacks} times"
    return Verdict(wrong=[wrong] if refused > lacks else [])


def judge_samples(entries: Iterable[Entry]) -> Verdict:
    """Equal requests to one snapshot must have equal answers, whenever and through whom they were made."""
    first: dict[str, Mapping[str, Any]] = {}
    verdict = Verdict()
    for entry in entries:
        if entry.result is None:
            continue
        request = repr(sorted(entry.arguments.items()))
        before = first.setdefault(request, entry.result)
        if before["tokens"] != entry.result["tokens"]:
            verdict.wrong.append(f"sample {request}: {entry.result['tokens']}, before {before['tokens']}")
        elif _distance(before["logprobs"], entry.result["logprobs"]) > LOGPROB_TOLERANCE:
            verdict.wrong.append(f"sample {request}: the same tokens with other log-probabilities")
    return verdict


def _distance(one: Sequence[float], other: Sequence[float]) -> float:
    if len(one) != len(other):
        return float("inf")
    return max((abs(a - b) for a, b in zip(one, other, strict=True)), default=0.0)


def _judge_answer(verdict: Verdict, name: str, entry: Entry) -> None:
    if entry.result is None:
        verdict.lost.append(f"{name}: {entry.error or 'no result'}")


def _judge_effect(
    verdict: Verdict, client: str, seq_id: int, entry: Entry, expected: Mapping[str, Any], ranks: int
) -> None:
    if entry.result is None or entry.kind == "publish":
        return
    for name, value in expected.items():
        found = entry.result.get(name)
        # Several ranks sum up the squares of their own parts; nothing else is a sum over elements.
        summed = ranks > 1 and name in NORMS and found is not None
        if found != value and not (summed and abs(found - value) <= NORM_ULPS * math.ulp(value)):
            verdict.wrong.append(f"{client} {entry.kind} {seq_id}: {name} is {found}, undisturbed {value}")


def _judge_stored(
    verdict: Verdict, history: History, expected: Sequence[Mapping[str, Any]], stored: Stored
) -> None:
    published = {
        seq_id: expected[seq_id]["weights"]
        for seq_id, entry in enumerate(history.training)
        if entry.kind == "publish" and seq_id < len(expected)
    }
    for version, weights in published.items():
        if version not in stored.weights:
            verdict.lost.append(f"{history.client} publish {version}: no snapshot is stored")
        elif stored.weights[version] != weights:
            verdict.wrong.append(f"{history.client} publish {version}: other weights than undisturbed")
    for version in sorted(stored.weights.keys() - published.keys()):
        verdict.wrong.append(f"{history.client}: a snapshot {version} that nobody asked for")
    for seq_id, state in stored.futures.items():
        if seq_id >= len(history.training):
            verdict.wrong.append(f"{history.client}: a request {seq_id} that nobody made")
        elif state != "done":
            verdict.lost.append(f"{history.client} request {seq_id}: its future is {state}")
    for seq_id in range(len(history.training)):
        if seq_id not in stored.futures:
            verdict.lost.append(f"{history.client} request {seq_id}: it has no future")
