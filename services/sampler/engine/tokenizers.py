"""The tokenizer of the engine's model, in a form that other processes can use without the model's library.

Invariant: it encodes and decodes as the engine's own does, being the same object of the same library.
"""

from __future__ import annotations

from typing import Any

from services.common.contract.errors import InvalidRequest
from services.sampler.engine.sampling import ServedTokenizer


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
