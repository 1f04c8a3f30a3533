"""What inference is asked, and what it answers, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from services.common.contract import ids
from services.common.contract.errors import InvalidRequest
from services.common.contract.sample_schema import MAX_SAMPLED_TOKENS
from services.common.contract.steering import Steering
from services.gateway.access.answer_room import SCORED_TIMES, TEXT_TIMES
from services.gateway.text.generated import Token
from services.gateway.text.told import Told

_PAIR_BYTES = 8
"""A token and its log-probability, as a sampler tells them."""

_SEQUENCE_BYTES = 192
_RESULT_BYTES = 128
"""More than what stands around the tokens of a sequence, and around the sequences of a result."""


@dataclass(frozen=True)
class Constraint:
    """What a text must match; see Constraint in sampler.proto. `source` is JSON."""

    kind: Literal["json_schema", "structural_tag"]
    source: str


@dataclass(frozen=True)
class Question:
    """One request, of one or several prompts.

    Attributes:
        prompts: token ids.
        num_samples: sequences of each prompt.
        max_tokens: of each sequence; None = to the end of the context, or as many as there is room for.
        top_k: -1 = all tokens.
        seed: prompt i has the seeds from seed + i * num_samples on; None = every request differs.
        stop: strings that end a sequence besides the model's end-of-sequence tokens.
        scored: the log-probabilities of sampled tokens are told.
        likely: the most likely tokens that are told at each sampled position.
        prompt_likely: the same at each prompt position; None = prompts are not scored.
        echo: every sequence is answered with its prompt before it.
        stream: tokens are told as they come.
    """

    prompts: Sequence[Sequence[int]]
    num_samples: int = 1
    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    steering: Steering = field(default_factory=Steering)
    scored: bool = False
    likely: int = 0
    prompt_likely: int | None = None
    echo: bool = False
    constraint: Constraint | None = None
    stream: bool = False

    @property
    def times(self) -> int:
        """Memory that its answer takes, in times of what a sampler tells."""
        return SCORED_TIMES if self.scored else TEXT_TIMES

    def echoed(self, prompt: int) -> int:
        """Tokens that the answer has before the sequences of a prompt, likely ones included."""
        repeated = self.num_samples * len(self.prompts[prompt]) if self.echo else 0
        return repeated * (1 + (self.prompt_likely or 0))

    @property
    def sequences(self) -> int:
        """Of all prompts."""
        return len(self.prompts) * self.num_samples

    def told_besides(self, prompt: int) -> int:
        """Most bytes of the answer to a prompt that are no sampled tokens."""
        scored = 0 if self.prompt_likely is None else len(self.prompts[prompt]) * (1 + self.prompt_likely)
        pairs = scored + self.echoed(prompt)
        return _RESULT_BYTES + self.num_samples * _SEQUENCE_BYTES + _PAIR_BYTES * pairs

    def answer_bytes(self, prompt: int, told: int) -> int:
        """Memory that the answer to a prompt takes, of which a sampler told so many bytes."""
        return self.times * (told + _PAIR_BYTES * self.echoed(prompt))


@dataclass(frozen=True)
class New:
    """More tokens of a sequence."""

    prompt: int
    sequence: int
    tokens: Sequence[Token]


@dataclass(frozen=True)
class Sequenced:
    """A whole sequence. `stopped`: at a stop string or end-of-sequence token, not at its length."""

    tokens: Told
    stopped: bool


@dataclass(frozen=True)
class Done:
    """All that came of one prompt.

    Attributes:
        scored: the prompt's tokens with their scores, when asked for; the first has none (NaN).
    """

    prompt: int
    sequences: Sequence[Sequenced]
    prompt_tokens: int
    cached_tokens: int
    scored: Sequence[Token]


def bounded(question: Question, largest: int) -> Question:
    """The question with a length for which its answer has room whatever is sampled: what is asked for, or as
    much as there is room for when nothing is.

    Args:
        largest: bytes of memory that one answer may take.

    Raises:
        InvalidRequest: there is none; with what to lower.
    """
    besides = sum(map(question.told_besides, range(len(question.prompts))))
    most = max(0, largest // question.times - besides) // _PAIR_BYTES
    of_token = question.sequences * (1 + question.likely)
    wanted = 1 if question.max_tokens is None else question.max_tokens
    if wanted * of_token > most:
        raise InvalidRequest(
            f"{question.sequences} sequences of {wanted} tokens at most, with {question.likely} likely ones "
            f"each, may come to {wanted * of_token} in one answer, which may have {most} besides its prompts "
            "(--memory-mib); lower max_tokens, n, the number of prompts or that of log-probabilities",
            "answer_too_large",
        )
    if question.max_tokens is not None:
        return question
    return replace(question, max_tokens=min(most // of_token, MAX_SAMPLED_TOKENS))


@dataclass(frozen=True)
class ModelName:
    """What a model's name stands for: a base model, a named checkpoint, or both where they must agree."""

    base_model: str | None
    path: str | None


def parse_model(name: str) -> ModelName:
    """Reads "org/base", "tinker://<run>/sampler_weights/<name>" or "<base>;<tinker path>".

    Raises:
        InvalidRequest: it is none of them.
    """
    base, separator, path = name.partition(";")
    if not separator and name.startswith("tinker://"):
        base, path = "", name
    if path or separator:
        ids.parse_tinker_path(path)
    if not base and not path:
        raise InvalidRequest("model is empty; name a base model or tinker://<run>/sampler_weights/<name>")
    return ModelName(base or None, path or None)
