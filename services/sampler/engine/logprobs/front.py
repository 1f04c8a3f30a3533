"""Log-probabilities as vLLM's front end takes them: each output has those of its tokens before anybody reads
it.

Invariant: which of an array's numbers are whose is read from the message alone, whatever has become of a
request here meanwhile; a message that does not come out even is an error, and none of its numbers is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.logprobs import LogprobsProcessor

from services.sampler.engine.logprobs.kept import KeptLogprobs


class Sampled(list[float]):
    """Log-probabilities of an output's tokens, in the place of vLLM's LogprobsLists."""

    __slots__ = ()

    def slice_request(self, start: int, count: int) -> Sampled:
        """vLLM takes what is left of them where a stop string ends before the last token."""
        return Sampled(self[start : start + count])


def install(llm: Any) -> None:
    """Has a front end take what `core` sends.

    Args:
        llm: vLLM's AsyncLLM, which has answered nothing yet.
    """
    of = llm.engine_core
    for has, name in ((of, "get_output_async"), (LogprobsProcessor, "update_from_output")):
        if not hasattr(has, name):
            kind = has if isinstance(has, type) else type(has)
            raise RuntimeError(f"this vLLM's {kind.__name__} has no {name}; check {__name__}")
    get = of.get_output_async

    async def got() -> Any:
        told = await get()
        unpack(told.outputs)
        return told

    of.get_output_async = got


def unpack(outputs: Sequence[EngineCoreOutput]) -> None:
    """Gives each output of a step its part of what the first of them has for all, if one has.

    Raises:
        ValueError: it is not as much as the outputs are to have.
    """
    packed = next((output.new_logprobs for output in outputs if _is_packed(output)), None)
    if packed is None:
        return
    values, counts = packed.logprobs.tolist(), packed.sampled_token_ranks.tolist()
    if len(counts) != len(outputs) or sum(counts) != len(values):
        raise ValueError(f"{len(values)} log-probabilities came with {len(outputs)} outputs, for {counts}")
    start = 0
    for output, count in zip(outputs, counts, strict=True):
        if count:
            own: Any = Sampled(values[start : start + count])
            output.new_logprobs = own
            start += count


def _is_packed(output: EngineCoreOutput) -> bool:
    # vLLM's own have a row for each token.
    return output.new_logprobs is not None and output.new_logprobs.logprobs.ndim == 1


class Processor(LogprobsProcessor):
    """Keeps a request's log-probabilities, those that came so and those of vLLM's own way."""

    @classmethod
    def of(cls, other: LogprobsProcessor) -> Processor:
        """In the place of vLLM's, which has none yet. Makes no text of tokens that have a log-probability."""
        own = cls(**{**vars(other), "tokenizer": None})
        if other.num_logprobs == 0:
            kept: Any = KeptLogprobs()
            own.logprobs = kept
        return own

    def update_from_output(self, output: EngineCoreOutput) -> None:
        own: Any = output.new_logprobs
        if type(own) is Sampled:
            self._append(output.new_token_ids, own)
            output.new_logprobs = None
        super().update_from_output(output)

    def _append(self, tokens: list[int], values: Sampled) -> None:
        """Both are as many (`core.pack`): else it would raise in vLLM's output handler, which ends the
        replica."""
        kept: Any = self.logprobs
        assert isinstance(kept, KeptLogprobs) and self.cumulative_logprob is not None
        for token, value in zip(tokens, values, strict=True):
            kept.token_ids.append(token)
            kept.logprobs.append(value)
            self.cumulative_logprob += value
