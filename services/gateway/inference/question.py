"""What inference is asked, and what it answers, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from services.common.contract import ids
from services.common.contract.errors import InvalidRequest
from services.gateway.text.generated import Token


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
        max_tokens: of each sequence; None = to the end of the context.
        top_k: -1 = all tokens.
        seed: prompt i has the seeds from seed + i * num_samples on; None = every request differs.
        stop: strings that end a sequence besides the model's end-of-sequence tokens.
        likely: the most likely tokens that are told at each sampled position.
        prompt_likely: the same at each prompt position; None = prompts are not scored.
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
    likely: int = 0
    prompt_likely: int | None = None
    constraint: Constraint | None = None
    stream: bool = False


@dataclass(frozen=True)
class New:
    """More tokens of a sequence."""

    prompt: int
    sequence: int
    tokens: Sequence[Token]


@dataclass(frozen=True)
class Sequenced:
    """A whole sequence. `stopped`: at a stop string or end-of-sequence token, not at its length."""

    tokens: Sequence[Token]
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
    scored: Sequence[Token] = ()


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
