"""A served tokenizer: text to tokens and back.

Invariants: it is the sampler's own tokenizer, so a text has the tokens that the engine's library would give.
Long texts are for threads, and keep nobody else waiting: of the library's functions only those for several
texts let other threads of the interpreter run meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tokenizers

from services.gateway.text.chat_template import ChatTemplate
from services.gateway.text.tool_calls import teaches_calls

_WORD = "\u2581"


class Tokenizer:
    """One base model's tokenizer and chat template.

    Args:
        source: JSON of the tokenizers library.
        chat_template: Jinja source; empty = the model has none.
        special_tokens: what a template may name ("eos_token" and others).

    Raises:
        ValueError: the source is none.
    """

    def __init__(self, source: str, chat_template: str, special_tokens: Mapping[str, str]) -> None:
        self._tokenizer = tokenizers.Tokenizer.from_str(source)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.chat_template = ChatTemplate(chat_template, special_tokens) if chat_template else None
        self.calls_tools = teaches_calls(chat_template)

    def tokens(self, text: str, *, special: bool) -> list[int]:
        """The tokens of a text. Takes time in proportion to it.

        Args:
            special: add what the tokenizer puts around a text of its own; a rendered chat has it already.
        """
        (found,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)
        return list(found.ids)

    def text(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special ones."""
        (found,) = self._tokenizer.decode_batch([list(tokens)], skip_special_tokens=True)
        return str(found)

    def piece(self, token: int) -> str:
        """The text of one token, special or not; what is no whole character comes as U+FFFD."""
        name = self._tokenizer.id_to_token(token)
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        # Decoders of whole texts drop the space that a word begins with.
        lost = name is not None and name.startswith(_WORD) and not text.startswith(" ")
        return f" {text}" if lost else text
