"""Samples.

Invariant: a stream that breaks off is asked for again, and goes on after the tokens that were told.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from tinsmith.v1 import results_pb2, sampling_pb2
from tinsmith_client.calls import Calls
from tinsmith_client.errors import CallFailed, Changed
from tinsmith_client.results import Pending
from tinsmith_client.tensors import floats, ints, tensor
from tinsmith_client.watching import watched

OnUpdate = Literal["finish", "continue", "continue_keep_kv"]
"""What becomes of a running sample of an inflight sampler when its model has newer weights: it finishes on
those that it began with, or goes on with the newer ones from its next token on, with keys and values of what
it has computed anew, or kept."""

_CLONE_NUMBERS = 1_000_000_000
"""Clients of one sampling session have blocks of so many numbers."""

_ON_UPDATE = {
    "finish": sampling_pb2.ON_UPDATE_FINISH,
    "continue": sampling_pb2.ON_UPDATE_CONTINUE,
    "continue_keep_kv": sampling_pb2.ON_UPDATE_CONTINUE_KEEP_KV,
}
_CANCELLED = sampling_pb2.STOP_REASON_CANCELLED


@dataclass(frozen=True)
class Span:
    """Tokens in a row that the same weights made. `version`: the number of the save; 0 = the base model.
    `kv_kept`: keys and values of what was before them are those of earlier weights; streams say it when a
    sequence is whole."""

    version: int
    tokens: int
    kv_kept: bool = False


@dataclass(frozen=True)
class Stream:
    """Tokens of one sequence of a stream, with their log-probabilities.

    Attributes:
        request_id: of the sample, for `Sampler.keep` and `Sampler.cancel`.
        stopped: it is whole, and ended at a stop (True), or at its length or because it was kept (False);
            None = it goes on.
        kept: it is whole, and was ended by `Sampler.keep`.
        versions: which weights made the tokens, one for all that are told together; when it is whole, all of
            its tokens, in order.
    """

    index: int
    tokens: Sequence[int]
    logprobs: Sequence[float]
    stopped: bool | None = None
    kept: bool = False
    versions: Sequence[Span] = ()
    request_id: str = ""


class PendingSample(Pending[sampling_pb2.SampleResult]):
    """A sample that is accepted."""

    def __init__(
        self, calls: Calls, request_id: str, known: results_pb2.OperationResult | None = None
    ) -> None:
        super().__init__(calls, request_id, lambda r: r.sample, known)

    def keep(self) -> sampling_pb2.SampleResult:
        """Ends it with what it has come to, and returns that. Sequences that had not ended have the stop
        reason CANCELLED; to go on, on any weights, send prompt and tokens as a new prompt. Raises as
        `result`, and Refused when there is no such sample."""
        if self._known is None:
            _end(self._calls, self.request_id, keep=True)
        return self.result()

    def cancel(self) -> None:
        """Gives it up: its result is the error "cancelled", unless it was done before."""
        _end(self._calls, self.request_id, keep=False)


class Sampler:
    """Answers from one set of weights. Safe to use from several threads.

    Attributes:
        sampling_session_id: names it.
    """

    def __init__(self, calls: Calls, sampling_session_id: str) -> None:
        self._calls = calls
        # Numbers that were not used before: another process may have had this sampling session.
        self._clone = secrets.randbits(23)
        self._numbers = itertools.count(self._clone * _CLONE_NUMBERS + secrets.randbits(28))
        self.sampling_session_id = sampling_session_id

    def sample(
        self,
        prompt: Sequence[int],
        num_samples: int = 1,
        *,
        max_tokens: int | None = None,
        temperature: float = 1.0,
        top_k: int = -1,
        top_p: float = 1.0,
        seed: int | None = None,
        stop: Sequence[str] = (),
        on_update: OnUpdate = "finish",
        routed_experts: bool = False,
    ) -> PendingSample:
        """Samples sequences; see docs/sampling.md. `versions` tells which weights made them.

        Args:
            stop: strings that end a sequence, as end-of-sequence tokens always do.
            on_update: "continue" is for inflight samplers, and without stop strings; "continue_keep_kv" is
                for inflight samplers of adapters.
            routed_experts: each sequence has the experts of its tokens, for `datum` to replay.

        Raises:
            Refused: something of it has to change.
        """
        params = _params(max_tokens, temperature, top_k, top_p, seed, stop)
        request = self._request(prompt, num_samples, params, on_update)
        request.routed_experts = routed_experts
        sent = self._calls.unary("Sample", request)
        return PendingSample(self._calls, sent.request_id)

    def stream(
        self,
        prompt: Sequence[int],
        num_samples: int = 1,
        *,
        max_tokens: int | None = None,
        temperature: float = 1.0,
        top_k: int = -1,
        top_p: float = 1.0,
        seed: int | None = None,
        stop: Sequence[str] = (),
        on_update: OnUpdate = "finish",
    ) -> Iterator[Stream]:
        """The same, told as it is generated.

        Raises:
            Refused, Unreachable: while iterating.
            Changed: the stream broke off, and goes on otherwise than it was begun.
        """
        params = _params(max_tokens, temperature, top_k, top_p, seed, stop)
        sample = self._request(prompt, num_samples, params, on_update)
        request, request_id = sampling_pb2.StreamSampleRequest(sample=sample), ""
        told: list[list[int]] = [[] for _ in range(num_samples)]
        ended: set[int] = set()
        for attempt in self._calls.attempts():
            try:
                for answer in self._calls.stream("StreamSample", request, None):
                    attempt.went_well()
                    request_id = answer.request_id or request_id
                    if answer.HasField("new_tokens"):
                        new = answer.new_tokens
                        fresh = _fresh(told[new.index], ints(new.tokens.data), new.start)
                        if fresh:
                            told[new.index] += fresh
                            logprobs = floats(new.logprobs.data)[-len(fresh) :]
                            by = [Span(new.version, len(fresh))]
                            yield Stream(new.index, fresh, logprobs, versions=by, request_id=request_id)
                    elif answer.HasField("end") and answer.end.index not in ended:
                        ended.add(answer.end.index)
                        yield _whole(answer.end, request_id)
                return
            except CallFailed as error:
                if error.status == "DATA_LOSS":
                    raise Changed(error.message) from error
                attempt.failed(error)

    def watch(self, timeout: float | None = None) -> Iterator[PendingSample]:
        """Each sample of this sampler as soon as its result is there, when `result` returns or raises at
        once; those first that ended before. All come with one call, without end, and more may be sent
        meanwhile. What was told is let go: the service keeps it for another minute.

        Args:
            timeout: longest wait for the next one, at least a second; None: for ever.

        Raises:
            TimeoutError: while iterating: there was none for so long.
            Refused: while iterating: the session is over, and all was told.
            Unreachable: while iterating: the service cannot be asked.
        """
        for request_id, result in watched(self._calls, self.sampling_session_id, self._clone, timeout):
            yield PendingSample(self._calls, request_id, result)

    def keep(self, request_id: str) -> None:
        """Ends a sample with what it has come to: its streams end, and its result is there."""
        _end(self._calls, request_id, keep=True)

    def cancel(self, request_id: str) -> None:
        """Gives a sample up, unless it is done."""
        _end(self._calls, request_id, keep=False)

    def _request(
        self,
        prompt: Sequence[int],
        num_samples: int,
        params: sampling_pb2.SamplingParams,
        on_update: OnUpdate,
    ) -> sampling_pb2.SampleRequest:
        return sampling_pb2.SampleRequest(
            sampling_session_id=self.sampling_session_id,
            seq_id=next(self._numbers),
            prompt=tensor("i", prompt),
            num_samples=num_samples,
            params=params,
            on_update=_ON_UPDATE[on_update],
        )


def versions(sequence: sampling_pb2.SampledSequence) -> list[Span]:
    """Which weights made a sequence's tokens, all of them, in order."""
    return [Span(span.version, span.tokens, span.kv_kept) for span in sequence.versions]


def _end(calls: Calls, request_id: str, keep: bool) -> None:
    calls.unary("CancelSample", sampling_pb2.CancelSampleRequest(request_id=request_id, keep=keep))


def _whole(end: sampling_pb2.SequenceEnd, request_id: str) -> Stream:
    spans = [Span(span.version, span.tokens, span.kv_kept) for span in end.versions]
    stopped = end.stop_reason == sampling_pb2.STOP_REASON_STOP
    return Stream(end.index, (), (), stopped, end.stop_reason == _CANCELLED, spans, request_id)


def _fresh(told: Sequence[int], tokens: Sequence[int], start: int) -> list[int]:
    """Tokens of a sequence, from a place on, that come after those that were told."""
    known = len(told) - start
    if list(told[start:]) != list(tokens[:known]) and list(tokens) != list(told[start : start + len(tokens)]):
        raise Changed("a sampler was lost, and another one does not go on with the same tokens")
    return list(tokens[known:])


def _params(
    max_tokens: int | None,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int | None,
    stop: Sequence[str],
) -> sampling_pb2.SamplingParams:
    made = sampling_pb2.SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
    )
    if stop:
        made.stop.strings.values.extend(stop)
    else:
        made.stop.model_eos.SetInParent()
    return made
