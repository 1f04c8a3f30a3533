"""Samples.

Invariant: a stream that breaks off is asked for again, and goes on after the tokens that were told.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tinsmith.v1 import sampling_pb2
from tinsmith_client.calls import Calls
from tinsmith_client.errors import CallFailed, Changed
from tinsmith_client.results import Pending
from tinsmith_client.tensors import floats, ints, tensor


@dataclass(frozen=True)
class Stream:
    """Tokens of one sequence of a stream, with their log-probabilities. `stopped`: it is whole, and ended
    at a stop (True) or its length (False); None = it goes on."""

    index: int
    tokens: Sequence[int]
    logprobs: Sequence[float]
    stopped: bool | None = None


class Sampler:
    """Answers from one set of weights. Safe to use from several threads.

    Attributes:
        sampling_session_id: names it.
    """

    def __init__(self, calls: Calls, sampling_session_id: str) -> None:
        self._calls = calls
        # Any number that was not used before: another process may have had this sampling session.
        self._numbers = itertools.count(secrets.randbits(39))
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
    ) -> Pending[sampling_pb2.SampleResult]:
        """Samples sequences; see docs/sampling.md.

        Args:
            stop: strings that end a sequence, as end-of-sequence tokens always do.
        """
        params = _params(max_tokens, temperature, top_k, top_p, seed, stop)
        sent = self._calls.unary("Sample", self._request(prompt, num_samples, params))
        return Pending(self._calls, sent.request_id, lambda r: r.sample)

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
    ) -> Iterator[Stream]:
        """The same, told as it is generated.

        Raises:
            Refused, Unreachable: while iterating.
            Changed: the stream broke off, and goes on otherwise than it was begun.
        """
        params = _params(max_tokens, temperature, top_k, top_p, seed, stop)
        request = sampling_pb2.StreamSampleRequest(sample=self._request(prompt, num_samples, params))
        told: list[list[int]] = [[] for _ in range(num_samples)]
        ended: set[int] = set()
        for attempt in self._calls.attempts():
            try:
                for answer in self._calls.stream("StreamSample", request, None):
                    attempt.went_well()
                    if answer.HasField("new_tokens"):
                        new = answer.new_tokens
                        fresh = _fresh(told[new.index], ints(new.tokens.data), new.start)
                        if fresh:
                            told[new.index] += fresh
                            logprobs = floats(new.logprobs.data)[-len(fresh) :]
                            yield Stream(new.index, fresh, logprobs)
                    elif answer.HasField("end") and answer.end.index not in ended:
                        ended.add(answer.end.index)
                        yield Stream(
                            answer.end.index, (), (), answer.end.stop_reason == sampling_pb2.STOP_REASON_STOP
                        )
                return
            except CallFailed as error:
                if error.status == "DATA_LOSS":
                    raise Changed(error.message) from error
                attempt.failed(error)

    def _request(
        self, prompt: Sequence[int], num_samples: int, params: sampling_pb2.SamplingParams
    ) -> sampling_pb2.SampleRequest:
        return sampling_pb2.SampleRequest(
            sampling_session_id=self.sampling_session_id,
            seq_id=next(self._numbers),
            prompt=tensor("i", prompt),
            num_samples=num_samples,
            params=params,
        )


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
