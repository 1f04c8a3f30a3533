"""What several sets of weights made of a sequence is one sequence."""

from __future__ import annotations

import dataclasses

import numpy as np

from services.common.contract.sample_schema import Scoring
from services.sampler.engine.sampling import (
    SampleJob,
    SampleOutput,
    SamplingParams,
    Sequence,
    VersionSpan,
    begun,
    joined,
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
