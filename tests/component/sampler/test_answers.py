"""What a worker makes of logits, and what the front end makes of the engine's output."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from vllm.config.structured_outputs import StructuredOutputsConfig
from vllm.logprobs import FlatLogprobs, Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import SamplingParams as VllmParams
from vllm.tokenizers import get_tokenizer
from vllm.triton_utils import HAS_TRITON
from vllm.v1.structured_output import backend_xgrammar

from services.common.contract.errors import Internal, InvalidRequest
from services.common.contract.matrices import HostMatrix
from services.common.contract.sample_schema import Scoring
from services.common.contract.steering import Steering
from services.sampler.engine.answers import Made, sequence, whole
from services.sampler.engine.grammars.checking import BACKEND, Checks
from services.sampler.engine.logprobs.kept import KeptLogprobs
from services.sampler.engine.params import Shared, bad_word_ids, vllm_params
from services.sampler.engine.sampling import Change, Constraint, Limits, SampleJob, SamplingParams
from services.sampler.worker.prompt_scores import Buffers, ScorePlan, plan_of
from services.sampler.worker.row_scores import LogprobsOf, RowScores
from services.sampler.worker.v1.prompt_scorer import log_softmax
from services.sampler.worker.v2.prompt_scorer import cells
from tests.component.sampler.process import make_model

VOCAB, ROWS = 40, 23
MADE = (Change(0, 3),)
PROMPT = torch.randint(0, VOCAB, (ROWS + 1,), generator=torch.Generator().manual_seed(1)).tolist()
LOGITS = 4 * torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(2))
SPARSE = HostMatrix(
    (ROWS, 9),
    np.array([5, -1, 39, 0, 7, 7]),
    np.array([0] * 3 + [3] * 15 + [4] * 3 + [6] * 3),
    np.array([0, 1, 8, 2, 3, 4]),
)


@pytest.fixture(
    params=[
        log_softmax,
        pytest.param(cells, marks=pytest.mark.skipif(not HAS_TRITON, reason="`make test-runner` has Triton")),
    ],
    ids=["V1", "V2"],
)
def by(request: pytest.FixtureRequest) -> LogprobsOf:
    """How each model runner takes log-probabilities of logits."""
    made: LogprobsOf = request.param
    return made


def filled(scoring: Scoring, cuts: list[int], by: LogprobsOf, temperature: float = 0.7) -> Buffers:
    plan = plan_of(scoring, ROWS + 1, seed=2**63 + 1, temperature=temperature)
    steps = [int(rows[0]) for rows in np.split(plan.needed(), cuts) if rows.size]
    return scored(plan, LOGITS, [0, *steps[1:], ROWS + 1], by)


def scored(plan: ScorePlan, logits: torch.Tensor, steps: list[int], by: LogprobsOf) -> Buffers:
    """The answer when the prefill is cut at these rows."""
    scores = RowScores(plan, logits.device, by)
    for start, stop in itertools.pairwise(steps):
        assert scores.answer(start) is None
        if (rows := scores.rows(start, stop)).size:
            there = torch.from_numpy(rows)
            scores.fill(rows, torch.tensor(PROMPT)[there + 1], logits[there])
    vector = scores.answer(steps[-1])
    assert vector is not None
    return Buffers(plan, vector.numpy())


@pytest.mark.parametrize("cuts", [[1], [5, 6, 17], list(range(1, ROWS))])
@pytest.mark.parametrize(
    "scoring",
    [
        Scoring(True, 3, 0, SPARSE, 5, 4),
        Scoring(targets=SPARSE),
        Scoring(True, 2, 0, SPARSE),
        Scoring(prompt_alt_tokens_k=7),
    ],
)
def test_cutting_a_prompt_into_parts_changes_nothing(
    scoring: Scoring, cuts: list[int], by: LogprobsOf
) -> None:
    np.testing.assert_array_equal(filled(scoring, cuts, by).vector, filled(scoring, [], by).vector)


def test_every_part_of_an_answer_is_of_its_own_rows(by: LogprobsOf) -> None:
    logprobs = LOGITS.log_softmax(-1).numpy()
    found = filled(Scoring(True, 3, 0, SPARSE, 5, 4), [2, 9], by)
    np.testing.assert_allclose(found.own, [logprobs[r, PROMPT[r + 1]] for r in range(19, 23)], atol=1e-6)
    np.testing.assert_allclose(found.topk_logprobs, -np.sort(-logprobs[19:])[:, :3], atol=1e-6)
    expected = [logprobs[2, 5], logprobs[2, 39], logprobs[17, 0], logprobs[20, 7], logprobs[20, 7]]
    np.testing.assert_allclose(found.targets, expected, atol=1e-6)
    drawn = np.take_along_axis(logprobs, found.drawn_ids.astype(np.int64), axis=1)
    np.testing.assert_allclose(found.drawn_logprobs, drawn, atol=1e-6)


def test_a_prompt_of_which_a_row_was_passed_over_has_no_answer() -> None:
    plan = plan_of(Scoring(prompt_logprobs=True), ROWS + 1, seed=0, temperature=1.0)
    scores = RowScores(plan, LOGITS.device, log_softmax)
    assert not scores.rows(3, ROWS + 1).size
    assert scores.answer(ROWS + 1) is None


def test_a_token_without_probability_is_never_drawn_and_a_sure_one_always(by: LogprobsOf) -> None:
    logits = torch.full((ROWS, VOCAB), -torch.inf)
    sure = torch.randint(0, VOCAB, (ROWS,), generator=torch.Generator().manual_seed(3))
    logits[torch.arange(ROWS), sure] = 0.0
    plan = plan_of(Scoring(prompt_alt_tokens_k=50), ROWS + 1, seed=0, temperature=1.0)
    buffers = scored(plan, logits, [0, ROWS + 1], by)
    assert (buffers.drawn_ids == sure[:, None].numpy()).all()


def output(tokens: list[int], logprobs: Any, reason: str | None = "length") -> RequestOutput:
    completion = CompletionOutput(0, "", tokens, None, logprobs, finish_reason=reason)
    return RequestOutput("r", None, [1], None, [completion], finished=True)


def flat(rows: list[list[tuple[int, float]]]) -> FlatLogprobs:
    """The engine's form: at each position the sampled token, then the most likely ones."""
    made = FlatLogprobs()
    for row in rows:
        ids, logprobs = zip(*row, strict=True)
        made.append_fast(list(ids), list(logprobs), iter(range(len(row))), [None] * len(row))  # type: ignore[arg-type]
    return made


def kept(places: list[tuple[int, float]]) -> KeptLogprobs:
    """The same where no likely tokens are asked for."""
    made = KeptLogprobs()
    for token, logprob in places:
        made.append({token: Logprob(logprob)})
    return made


def test_a_sequence_has_a_log_probability_for_every_token() -> None:
    found = sequence(output([5, 6], kept([(5, -1.0), (6, -2.0)])).outputs[0], topk=0, changes=MADE)
    assert (found.tokens, found.logprobs, found.topk) == ([5, 6], [-1.0, -2.0], None)
    rows = [[(5, -1.0), (7, -0.5), (5, -1.0)], [(6, -2.0), (6, -2.0), (8, -3.0)]]
    found = sequence(output([5, 6], flat(rows)).outputs[0], topk=2, changes=MADE)
    assert found.logprobs == [-1.0, -2.0]
    assert found.topk is not None
    assert found.topk.token_ids.tolist() == [[7, 5], [6, 8]]
    assert found.topk.logprobs.tolist() == [[-0.5, -1.0], [-2.0, -3.0]]


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (output([5, 6], None), Internal),
        (output([5, 6], kept([(5, -1.0)])), Internal),
        (output([5, 6], kept([(5, -1.0), (7, -2.0)])), Internal),
        (output([5], flat([[(5, -1.0), (7, -0.5)]])), Internal),
        (output([5], kept([(5, -1.0)]), reason="error"), Internal),
        (output([5], kept([(5, -1.0)]), reason=None), Internal),
        (output([5], kept([(5, float("nan"))])), InvalidRequest),
    ],
)
def test_an_output_that_lacks_something_is_an_error_and_never_a_made_up_number(
    given: RequestOutput, error: type[Exception]
) -> None:
    with pytest.raises(error):
        sequence(given.outputs[0], topk=0, changes=MADE)


def test_likely_tokens_are_whole_where_outputs_were_joined() -> None:
    """vLLM joins the outputs of a stream without the sampled token among the likely ones."""
    likely = [(5, -1.0), (6, -2.0)]
    joined = output([5], flat([[(5, -1.0), *likely]]))
    joined.add(output([9, 6], flat([[(9, -7.0), *likely], [(6, -2.0), *likely]])), aggregate=True)
    found = sequence(joined.outputs[0], topk=2, changes=MADE)
    assert (found.tokens, found.logprobs) == ([5, 9, 6], [-1.0, -7.0, -2.0])
    assert found.topk is not None
    assert found.topk.token_ids.tolist() == [[5, 6]] * 3
    assert found.topk.logprobs.tolist() == [[-1.0, -2.0]] * 3


def test_a_constraint_that_no_grammar_can_be_made_of_is_the_requests_fault() -> None:
    ended = [Made(output([], kept([]), "error"), MADE)]
    plan = plan_of(Scoring(), 4, seed=0, temperature=1.0)
    job = SampleJob("r", None, [1, 2, 3, 4], 1, SamplingParams(), constraint=Constraint("json_schema", "{}"))
    with pytest.raises(InvalidRequest) as refused:
        whole(job, plan, ended)
    assert refused.value.code == "constraint_too_large"
    with pytest.raises(InvalidRequest, match=r"at token 2 .* no token goes on with") as refused:
        whole(job, plan, [Made(output([7, 0], kept([(7, -1.0), (0, -9.0)]), "error"), MADE)])
    assert refused.value.code == "constraint_dead_end"
    free = SampleJob("r", None, [1, 2, 3, 4], 1, SamplingParams())
    with pytest.raises(Internal):
        whole(free, plan, ended)


async def test_a_constraint_is_parsed_when_it_is_checked_and_not_again_for_every_sequence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parsed = []
    monkeypatch.setattr(backend_xgrammar, "validate_xgrammar_grammar", parsed.append)
    processor: Any = SimpleNamespace(
        model_config=SimpleNamespace(is_diffusion=False),
        structured_outputs_config=StructuredOutputsConfig(backend=BACKEND),
        tokenizer=object(),
    )
    constraint = await Checks(processor).check(Constraint("json_schema", '{"type": "string"}'))
    assert len(parsed) == 1
    job = SampleJob("r", None, [1, 2, 3], 4, SamplingParams(max_tokens=2))
    for index in range(4):
        params = vllm_params(job, index, Limits(100, 100, 8), None, Shared(constraint), stream=False)
        params._validate_structured_outputs(
            processor.model_config, processor.structured_outputs_config, processor.tokenizer
        )
        # What the engine's process reads is what it would have been told otherwise.
        told = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=VllmParams)
        assert told.structured_outputs is not None
        assert (told.structured_outputs.json, told.structured_outputs._backend) == (
            '{"type": "string"}',
            "xgrammar",
        )
    assert len(parsed) == 1


async def test_bad_words_that_a_worker_has_no_room_for_are_refused_before_they_reach_it(
    tmp_path: Path,
) -> None:
    processor: Any = SimpleNamespace(tokenizer=get_tokenizer(make_model(tmp_path / "model", tied=True)))
    for letter, refused in (("~", False), ("é", True)):
        words = tuple(letter * 126 + f"{index:02d}" for index in range(64))
        with pytest.raises(InvalidRequest, match="send fewer") if refused else nullcontext():
            await bad_word_ids(words, processor)


async def test_bad_words_are_encoded_once_a_job_and_every_sequence_has_what_vllm_would_make_of_them(
    tmp_path: Path,
) -> None:
    tokenizer = get_tokenizer(make_model(tmp_path / "model", tied=True))
    encoded: list[str] = []

    def encode(text: str, **options: bool) -> list[int]:
        encoded.append(text)
        return tokenizer.encode(text, **options)

    counting: Any = SimpleNamespace(encode=encode, max_token_id=tokenizer.max_token_id)
    words = ("no", " never", "nö")
    shared = Shared(bad_words=await bad_word_ids(words, SimpleNamespace(tokenizer=counting)))  # type: ignore[arg-type]
    own = VllmParams(bad_words=list(words))
    own.update_from_tokenizer(tokenizer)
    job = SampleJob("r", None, [1], 4, SamplingParams(max_tokens=1, steering=Steering(bad_words=words)))
    for index in range(4):
        asked = vllm_params(job, index, Limits(VOCAB, 64, 8), None, shared, stream=False)
        asked.update_from_tokenizer(counting)
        told = msgspec.msgpack.decode(msgspec.msgpack.encode(asked), type=VllmParams)
        assert (told.bad_words, told.bad_words_token_ids) == (list(words), own.bad_words_token_ids)
    assert len(encoded) == 2 * len(words)
    free = vllm_params(
        SampleJob("r", None, [1], 1, SamplingParams()), 0, Limits(VOCAB, 64, 8), None, Shared(), stream=False
    )
    assert not free.bad_words and free.bad_words_token_ids is None
