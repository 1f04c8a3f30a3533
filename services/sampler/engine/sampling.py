"""What a sampler is asked and what it answers, and the pure decisions about a request.

Invariants: a request that passed `check` cannot make the engine fail: every token id, length and
parameter is inside what this engine accepts. Of a sequence that more than one set of weights made, what each
made follows what the ones before it made, and the spans of versions cover all tokens, none twice. No torch,
no vLLM, no protobuf.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from services.common.contract import steering
from services.common.contract.errors import InvalidRequest
from services.common.contract.experts.routing import Routing
from services.common.contract.sample_schema import (
    MAX_SAMPLES,
    Scoring,
    check_answer,
    check_decoding,
    check_routed,
)
from services.common.contract.steering import Steering
from services.sampler.engine.snapshot_key import SnapshotKey
from services.sampler.worker.prompt_scores import PromptScores, TopkLogprobs

StopReason = Literal["stop", "length", "cancelled"]
"""Cancelled: the sequence was ended from outside, and could go on."""

_MASK64 = (1 << 64) - 1


@dataclass(frozen=True)
class SamplingParams:
    """How to sample; see SamplingParams in sampling.proto.

    Attributes:
        max_tokens: None = to the context length.
        seed: 0 .. 2**64 - 1; None = a fresh random stream.
        ignore_eos: end-of-sequence tokens do not stop.
        stop_strings, stop_token_ids: stop besides end-of-sequence.
        top_k: 0 or -1 = all tokens.
    """

    max_tokens: int | None = None
    seed: int | None = None
    ignore_eos: bool = False
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    steering: Steering = field(default_factory=Steering)


@dataclass(frozen=True)
class Constraint:
    """What a generated text must match, from its first token to its end.

    Attributes:
        kind: "json_schema" = a JSON value that a JSON Schema admits; "structural_tag" = a structural tag of
            XGrammar; "regex" = a regular expression.
        source: JSON, or the expression.
    """

    kind: Literal["json_schema", "structural_tag", "regex"]
    source: str


@dataclass(frozen=True)
class SampleJob:
    """One Sample call.

    Attributes:
        snapshot: None = the base model.
        prompt: token ids.
        scoring: log-probabilities asked for besides those of the sampled tokens.
        cache_namespace: cached keys and values are shared with jobs of the same name only.
        constraint: None = any text.
        moves: it goes on with newer weights of its model when it is told to.
        keeps_kv: then keys and values of the tokens before stay those of the weights that made them.
        sampled_logprobs: log-probabilities of sampled tokens are of the distribution that they were drawn
            from, not the model's own.
        routed_experts: which experts the model's layers gave the tokens to is told too.
        begun: what it has come to on other weights; sequences that were cancelled go on from there.
        left: when it left those weights, by `time.monotonic`.
    """

    request_id: str
    snapshot: SnapshotKey | None
    prompt: list[int]
    num_samples: int
    params: SamplingParams
    scoring: Scoring = field(default_factory=Scoring)
    cache_namespace: str = ""
    constraint: Constraint | None = None
    moves: bool = False
    keeps_kv: bool = False
    sampled_logprobs: bool = False
    routed_experts: bool = False
    begun: SampleOutput | None = None
    left: float | None = None

    @property
    def version(self) -> int:
        """Of the weights that it runs on; 0 = the base model's own."""
        return 0 if self.snapshot is None else self.snapshot.version


@dataclass(frozen=True)
class VersionSpan:
    """Tokens in a row that the same version of the weights made.

    Attributes:
        kv_kept: keys and values of what was before them, but for the last token, were kept as they were.
            False: this version computed all of them.
    """

    version: int
    tokens: int
    kv_kept: bool = False


@dataclass(frozen=True)
class Change:
    """From `start` tokens on this version makes a sequence; `kept` as VersionSpan.kv_kept."""

    start: int
    version: int
    kept: bool = False


@dataclass(frozen=True)
class Sequence:
    """One generated sequence: token ids with the stop token, and a log-probability for each.

    Attributes:
        topk: the most likely tokens at each position; None = not asked for.
        versions: which weights made the tokens, all of them, in order.
        experts: those that each routed layer gave the prompt's tokens and all but the last of these to:
            [tokens, layers, top_k], in the `dtype` of the model's Routing; None = not asked for, or no token.
    """

    stop_reason: StopReason
    tokens: list[int]
    logprobs: list[float]
    topk: TopkLogprobs | None = None
    versions: tuple[VersionSpan, ...] = ()
    experts: np.ndarray | None = None


@dataclass(frozen=True)
class NewTokens:
    """Tokens that sequence `index` of a job has just come to, after `start` others, on this version of the
    weights."""

    index: int
    start: int
    version: int
    tokens: list[int]
    logprobs: list[float]
    topk: TopkLogprobs | None = None


Tell = Callable[[NewTokens], None]
"""Is told new tokens as they come, in the engine's loop."""


@dataclass(frozen=True)
class SampleOutput:
    """What a SampleJob came to."""

    sequences: list[Sequence]
    cached_prompt_tokens: int
    scores: PromptScores = field(default_factory=PromptScores)


@dataclass(frozen=True)
class ServedTokenizer:
    """The tokenizer of the engine's model; see GetTokenizerResponse in sampler.proto."""

    tokenizer_json: str
    chat_template: str
    special_tokens: dict[str, str]


def served(tokenizer: Any) -> ServedTokenizer:
    """What can be told of a Hugging Face tokenizer.

    Raises:
        InvalidRequest: it has no form in the tokenizers library.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise InvalidRequest(
            f"this model's tokenizer, a {type(tokenizer).__name__}, has no form in the tokenizers library; "
            "sample token ids",
            "no_tokenizer",
        )
    template = tokenizer.chat_template or ""
    if isinstance(template, dict):
        template = template.get("default", "")
    named = {
        name: str(value) for name, value in tokenizer.special_tokens_map.items() if isinstance(value, str)
    }
    return ServedTokenizer(backend.to_str(), template, named)


@dataclass(frozen=True)
class Limits:
    """What the engine accepts.

    Attributes:
        vocab_size: token ids are 0 .. vocab_size - 1.
        context_length: most tokens of prompt and output together.
        max_sequences: sequences that it generates at once. One request may have more, up to MAX_SAMPLES.
        routing: how its model routes, where it tells which experts have a sample's tokens.
    """

    vocab_size: int
    context_length: int
    max_sequences: int
    routing: Routing | None = None


def check(job: SampleJob, limits: Limits) -> None:
    """Refuses what this engine cannot do exactly as asked.

    Raises:
        InvalidRequest: with what to change.
    """
    _check_prompt(job.prompt, limits)
    if not 1 <= job.num_samples <= MAX_SAMPLES:
        raise InvalidRequest(
            f"num_samples is {job.num_samples}; it must be from 1 to {MAX_SAMPLES}: "
            "send several requests for more"
        )
    _check_params(job.params, limits)
    if job.constraint is not None:
        steering.check_constrained(job.params.ignore_eos, bool(job.params.stop_token_ids))
    if job.moves and not job.keeps_kv:
        stops_at_text, constrained = bool(job.params.stop_strings), job.constraint is not None
        steering.check_continued(job.params.steering, stops_at_text, constrained)
    sampled = job.num_samples * tokens_left(job, limits)
    check_answer(job.scoring, len(job.prompt), limits.vocab_size, sampled)
    if job.routed_experts:
        check_routed(limits.routing, job.num_samples * len(job.prompt) + sampled, moves=job.moves)


def _check_prompt(prompt: list[int], limits: Limits) -> None:
    if not 1 <= len(prompt) < limits.context_length:
        raise InvalidRequest(
            f"the prompt has {len(prompt)} tokens; it must have from 1 to {limits.context_length - 1}, "
            f"so that at least one more fits into the context of {limits.context_length}",
            "prompt_length",
        )
    _check_tokens(prompt, limits, "prompt")


def _check_tokens(tokens: list[int] | tuple[int, ...], limits: Limits, name: str) -> None:
    if tokens and (min(tokens) < 0 or max(tokens) >= limits.vocab_size):
        wrong = next(token for token in tokens if not 0 <= token < limits.vocab_size)
        raise InvalidRequest(
            f"{name} has token id {wrong}; the model's ids are 0 to {limits.vocab_size - 1}",
            "token_out_of_range",
        )


def _check_params(params: SamplingParams, limits: Limits) -> None:
    check_decoding(params.temperature, params.top_k, params.top_p, params.max_tokens)
    steering.check(params.steering, limits.vocab_size)
    if params.seed is not None and not 0 <= params.seed <= _MASK64:
        raise InvalidRequest(f"seed is {params.seed}; it must be an unsigned 64-bit number")
    if "" in params.stop_strings:
        raise InvalidRequest("a stop string is empty; leave it out")
    _check_tokens(params.stop_token_ids, limits, "stop")


def sequence_seed(seed: int | None, index: int, start: int = 0) -> int | None:
    """Engine seed of sequence `index`: a 63-bit mix of seed + index (mod 2**64).

    The engine takes 63 bits, and PyTorch's generators on a CPU read the low 32 of them, so the 64 bits are
    mixed (the SplitMix64 finalizer): wherever two seeds differ, they share a stream by chance alone.

    Args:
        start: tokens of the sequence that were generated before. The engine begins a stream with every
            request: what goes on after them must not draw again what the first ones drew.
    """
    if seed is None:
        return None
    mixed = _mixed(seed + index)
    return (_mixed(mixed + start) if start else mixed) >> 1


def _mixed(value: int) -> int:
    mixed = (value + 0x9E3779B97F4A7C15) & _MASK64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK64
    return mixed ^ (mixed >> 31)


def tokens_left(job: SampleJob, limits: Limits) -> int:
    """Most tokens to generate: what was asked for, cut to what the context leaves."""
    left = limits.context_length - len(job.prompt)
    return left if job.params.max_tokens is None else min(job.params.max_tokens, left)


def begun(job: SampleJob, index: int) -> Sequence:
    """What sequence `index` of a job has come to before."""
    return job.begun.sequences[index] if job.begun is not None else _nothing(job)


def all_begun(job: SampleJob) -> list[Sequence]:
    """The same of all of its sequences."""
    return job.begun.sequences if job.begun is not None else [_nothing(job)] * job.num_samples


def untouched(job: SampleJob) -> SampleOutput:
    """A job that was cancelled before its first token."""
    return SampleOutput([_nothing(job)] * job.num_samples, 0)


def unfinished(output: SampleOutput) -> bool:
    """Whether a sequence could go on."""
    return any(sequence.stop_reason == "cancelled" for sequence in output.sequences)


def joined(before: Sequence, after: Sequence) -> Sequence:
    """A sequence and its continuation, which says how it ended."""
    topk = after.topk
    if before.topk is not None and topk is not None:
        ids = np.concatenate([before.topk.token_ids, topk.token_ids])
        topk = TopkLogprobs(ids, np.concatenate([before.topk.logprobs, topk.logprobs]))
    return Sequence(
        after.stop_reason,
        before.tokens + after.tokens,
        before.logprobs + after.logprobs,
        topk,
        _spans(before.versions, after.versions),
        after.experts,
    )


def spans(changes: tuple[Change, ...], tokens: int) -> tuple[VersionSpan, ...]:
    """Which weights made a sequence of so many tokens, by the changes of its weights, of which the first is
    from its first token on."""
    ends = [change.start for change in changes[1:]] + [tokens]
    made = (
        VersionSpan(change.version, min(end, tokens) - change.start, change.kept)
        for change, end in zip(changes, ends, strict=True)
    )
    return tuple(span for span in made if span.tokens > 0)


def parts(new: NewTokens, changes: tuple[Change, ...]) -> list[NewTokens]:
    """New tokens, apart where the weights changed between them."""
    end = new.start + len(new.tokens)
    cuts = [new.start, *(change.start for change in changes if new.start < change.start < end), end]
    found = []
    for start, stop in itertools.pairwise(cuts):
        own = slice(start - new.start, stop - new.start)
        topk = new.topk and TopkLogprobs(new.topk.token_ids[own], new.topk.logprobs[own])
        version = [change.version for change in changes if change.start <= start][-1]
        found.append(NewTokens(new.index, start, version, new.tokens[own], new.logprobs[own], topk))
    return found


def _spans(before: tuple[VersionSpan, ...], after: tuple[VersionSpan, ...]) -> tuple[VersionSpan, ...]:
    if not before or not after or before[-1].version != after[0].version:
        return before + after
    both = dataclasses.replace(after[0], tokens=before[-1].tokens + after[0].tokens)
    return (*before[:-1], both, *after[1:])


def _nothing(job: SampleJob) -> Sequence:
    k = job.scoring.topk_sample_logprobs
    topk = TopkLogprobs(np.empty((0, k), np.int32), np.empty((0, k), np.float32)) if k else None
    return Sequence("cancelled", [], [], topk)
