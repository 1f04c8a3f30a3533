"""The text of one generated sequence, as its tokens come.

Invariants: what was given out is never taken back, so what may be the beginning of a stop string, or of a
character, is held until it is known; the pieces, joined, are the same however the tokens were cut. A stop
string, and what follows it, is no part of the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.gateway.text.tokenizer import Tokenizer

_UNFINISHED = "\ufffd"
_CHARACTER_TOKENS = 8
"""No character has more tokens; what is none after so many will not be one."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A token with its log-probability."""

    id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Token:
    """A generated token.

    Attributes:
        likely: the most likely tokens in its place, most likely first.
    """

    id: int
    logprob: float
    likely: tuple[Scored, ...] = ()


@dataclass(frozen=True)
class Piece:
    """More of a text, and the tokens that it came with."""

    text: str = ""
    tokens: tuple[Token, ...] = ()


@dataclass
class _Held:
    """A token whose text begins at a character that was not given out."""

    token: Token
    start: int
    end: int = field(default=0)


class Generated:
    """The text of one sequence.

    Args:
        stops: stop strings; the text ends before the first.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._ids: list[int] = []
        self._read = 0
        self._text = ""
        self._given = 0
        self._length = 0
        self._held: list[_Held] = []
        self.count = 0
        """Tokens so far, those of stop strings and of the end included."""
        self.stop: str | None = None
        """The stop string that the text ends before."""

    def push(self, tokens: Sequence[Token]) -> Piece:
        """What is known of the text after more tokens."""
        for token in tokens:
            self.count += 1
            before = self._length
            self._take(self._decoded(token.id))
            self._held.append(_Held(token, before, self._length))
        return self._give(self._known())

    def finish(self, ended_at_stop: bool) -> Piece:
        """The rest of the text.

        Args:
            ended_at_stop: the sequence ended at a stop string or token, which is no part of it.
        """
        if self.stop is None and len(self._ids) > self._read:
            self._take(self._tail())
        piece = self._give(self._length, last=True)
        if ended_at_stop and self.stop is None and piece.tokens and not self._shows(piece.tokens[-1]):
            return Piece(piece.text, piece.tokens[:-1])
        return piece

    def _shows(self, token: Token) -> bool:
        return bool(self._tokenizer.text([token.id]))

    def _decoded(self, token: int) -> str:
        """The characters that a token completes."""
        self._ids.append(token)
        if len(self._ids) - self._read < _CHARACTER_TOKENS:
            text = self._tail()
            if not text or text.endswith(_UNFINISHED):
                return ""
        else:
            text = self._tail()
        # The last part stays as context: a decoder may treat the first token of a text in its own way.
        self._ids = self._ids[self._read :]
        self._read = len(self._ids)
        return text

    def _tail(self) -> str:
        """The text of the tokens that were not read, after those that were."""
        known = self._tokenizer.text(self._ids[: self._read])
        return self._tokenizer.text(self._ids)[len(known) :]

    def _take(self, text: str) -> None:
        if not text or self.stop is not None:
            return
        # Only what ends in the new text was not looked for before.
        start = max(0, len(self._text) - max(map(len, self._stops), default=0))
        self._text += text
        self._length += len(text)
        found = [(self._text.find(stop, start), stop) for stop in self._stops]
        first = min(((at, stop) for at, stop in found if at >= 0), default=None)
        if first is not None:
            cut, self.stop = first
            self._length -= len(self._text) - cut
            self._text = self._text[:cut]

    def _known(self) -> int:
        """Characters that are sure to stay."""
        if self.stop is not None or not self._stops:
            return self._length
        longest = max(map(len, self._stops)) - 1
        for size in range(min(longest, len(self._text)), 0, -1):
            end = self._text[-size:]
            if any(stop.startswith(end) for stop in self._stops):
                return self._length - size
        return self._length

    def _give(self, until: int, *, last: bool = False) -> Piece:
        size = until - self._given
        text, self._text = self._text[:size], self._text[size:]
        self._given = until
        ready = 0
        for held in self._held:
            # Of what a stop string cut off, no token stays.
            inside = held.start < until if self.stop is not None else held.end <= until
            if not inside and not (last and self.stop is None):
                break
            ready += 1
        # A token without text of its own may be the end, which is no part of the text.
        while not last and ready and self._held[ready - 1].start == self._held[ready - 1].end:
            ready -= 1
        given, self._held = self._held[:ready], self._held[ready:]
        return Piece(text, tuple(held.token for held in given))
