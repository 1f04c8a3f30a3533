"""What several sets of weights made of a sequence is one sequence."""

from __future__ import annotations

import dataclasses

import numpy as np

from services.common.contract.sample_schema import Scoring
from services.sampler.engine.sampling import (
    Change,
    NewTokens,
    SampleJob,
    SampleOutput,
    SamplingParams,
    Sequence,
    VersionSpan,
    begun,
    joined,
    parts,
    spans,
    unfinished,
    untouched,
)
from services.sampler.worker.prompt_scores import TopkLogprobs

JOB = SampleJob("request", None, [1], 2, SamplingParams(), Scoring(topk_sample_logprobs=2))


def segment(reason: str, version: int, *tokens: int) -> Sequence:
    ids = np.array([[token, 0] for token in tokens], np.int32).reshape(-1, 2)
    likely = TopkLogprobs(ids, ids.astype(np.float32))
    spans = (VersionSpan(version, len(tokens)),) if tokens else ()
    return Sequence(reason, list(tokens), [-1.0 * token for token in tokens], likely, spans)  # type: ignore[arg-type]


def test_segments_follow_each_other_and_the_last_says_how_it_ended() -> None:
    whole = joined(joined(segment("cancelled", 1, 5, 6), segment("cancelled", 4, 7)), segment("stop", 9, 8))
    assert (whole.stop_reason, whole.tokens, whole.logprobs) == ("stop", [5, 6, 7, 8], [-5, -6, -7, -8])
    assert [(span.version, span.tokens) for span in whole.versions] == [(1, 2), (4, 1), (9, 1)]
    assert whole.topk is not None and whole.topk.token_ids[:, 0].tolist() == whole.tokens
    assert whole.topk.logprobs.shape == (4, 2)


def test_what_the_same_weights_made_twice_in_a_row_is_one_span() -> None:
    nothing = segment("cancelled", 3)
    whole = joined(joined(segment("cancelled", 2, 5), nothing), segment("length", 2, 6, 7))
    assert [(span.version, span.tokens) for span in whole.versions] == [(2, 3)]


def test_a_job_begins_with_nothing_and_goes_on_with_what_it_has_come_to() -> None:
    assert begun(JOB, 1).tokens == []
    ended, half = segment("stop", 1, 5), segment("cancelled", 1, 6)
    output = SampleOutput([ended, half], 0)
    going_on = dataclasses.replace(JOB, begun=output)
    assert begun(going_on, 1) is half
    assert unfinished(output) and not unfinished(SampleOutput([ended, ended], 0))


def test_a_job_that_was_never_begun_has_empty_sequences_of_the_shapes_asked_for() -> None:
    output = untouched(JOB)
    assert [sequence.stop_reason for sequence in output.sequences] == ["cancelled", "cancelled"]
    assert all(sequence.topk is not None for sequence in output.sequences)
    assert [sequence.topk.token_ids.shape for sequence in output.sequences if sequence.topk] == [(0, 2)] * 2


def test_spans_follow_from_where_the_weights_changed_and_cover_all_tokens() -> None:
    changes = (Change(0, 1), Change(3, 2, kept=True), Change(5, 2, kept=False), Change(9, 4, kept=True))
    assert spans(changes, 7) == (
        VersionSpan(1, 3),
        VersionSpan(2, 2, kv_kept=True),
        VersionSpan(2, 2, kv_kept=False),
    )
    assert spans(changes, 2) == (VersionSpan(1, 2),)
    assert spans(changes, 0) == ()
    # What had no token before it changed was made by the later weights alone.
    assert spans((Change(0, 1), Change(0, 2)), 4) == (VersionSpan(2, 4),)


def test_new_tokens_are_told_apart_where_the_weights_changed() -> None:
    changes = (Change(0, 1), Change(3, 2, kept=True), Change(4, 7, kept=True))
    ids = np.arange(8, dtype=np.int32).reshape(4, 2)
    new = NewTokens(
        5, 2, 0, [10, 11, 12, 13], [-1.0, -2.0, -3.0, -4.0], TopkLogprobs(ids, -ids.astype(np.float32))
    )
    found = parts(new, changes)
    assert [(one.index, one.start, one.version, one.tokens) for one in found] == [
        (5, 2, 1, [10]),
        (5, 3, 2, [11]),
        (5, 4, 7, [12, 13]),
    ]
    assert [one.logprobs for one in found] == [[-1.0], [-2.0], [-3.0, -4.0]]
    assert [one.topk.token_ids.tolist() for one in found if one.topk] == [
        ids[:1].tolist(),
        ids[1:2].tolist(),
        ids[2:].tolist(),
    ]
    assert [(one.start, one.version) for one in parts(new, (Change(0, 3),))] == [(2, 3)]
