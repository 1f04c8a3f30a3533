"""The log-probabilities of a sequence's sampled tokens while it is generated.

vLLM's FlatLogprobs takes some 135 bytes for a token that has one log-probability: gigabytes where many long
sequences are generated at once. Here a token takes 8.

Invariant: number and token of a place were told together. Nothing is rounded: all of vLLM's are float32.
"""

from __future__ import annotations

from array import array

from vllm.logprobs import LogprobsOnePosition


class KeptLogprobs:
    """In the place of vLLM's list of rows, for what that is asked.

    Attributes:
        token_ids, logprobs: of each place the sampled token, int32 and float32.
    """

    __slots__ = ("logprobs", "token_ids")

    def __init__(self, token_ids: array[int] | None = None, logprobs: array[float] | None = None) -> None:
        self.token_ids = array("i") if token_ids is None else token_ids
        self.logprobs = array("f") if logprobs is None else logprobs

    def __len__(self) -> int:
        return len(self.logprobs)

    def __getitem__(self, places: slice) -> KeptLogprobs:
        """Of an output of a stream what is new."""
        return KeptLogprobs(self.token_ids[places], self.logprobs[places])

    def extend(self, other: KeptLogprobs) -> None:
        """Two outputs of a stream become one."""
        self.token_ids.extend(other.token_ids)
        self.logprobs.extend(other.logprobs)

    def append(self, row: LogprobsOnePosition) -> None:
        """A place that came by vLLM's own way: the sampled token is the first."""
        token, told = next(iter(row.items()))
        self.token_ids.append(token)
        self.logprobs.append(told.logprob)
