"""What XGrammar passes over, or reads in its own way, in a regular expression. It takes JavaScript's, as JSON
Schema does. Anchors it leaves out, with a warning in its log (mlc-ai/xgrammar#671 says so by the way); of
escapes that it does not know and of classes in classes no report was found.

Invariant: a text that the grammar of an expression admits which passes here is matched by it as a whole.
"""

from __future__ import annotations

import re

from services.common.contract.errors import InvalidRequest

_PIECES = re.compile(
    r"\\(?P<escape>.)|(?P<posix>\[\^?\[[:.=])|\[(?P<inside>(?:\\.|[^\]\\])*)\]?|(?P<open>\((?:\?(?::|<[A-Za-z]+>))?)|.",
    re.DOTALL,
)
_ESCAPES = re.compile(r"\\(.)", re.DOTALL)
# Of these XGrammar itself refuses back references, word boundaries and properties of characters.
_KNOWN = frozenset("dDwWsSnrtvfxuc0bBpPk")


def check_pattern(pattern: str, where: str) -> None:
    """Refuses an expression of which the grammar would admit what it does not match.

    Args:
        where: the expression is, for the message.

    Raises:
        InvalidRequest: with what to change.
    """
    anchors = _Anchors()
    for piece in _PIECES.finditer(pattern):
        for escape in piece["escape"] or _ESCAPES.findall(piece["inside"] or ""):
            if escape.isalpha() and escape not in _KNOWN:
                raise unsupported(
                    f"{where} has \\{escape}, which is none of JavaScript's escapes, as which it is read; "
                    "say it otherwise"
                )
        if piece["posix"]:
            raise unsupported(f"{where} has a class that begins with {piece[0]}; list its letters instead")
        if not anchors.take(piece[0], opens=piece["open"] is not None):
            raise unsupported(
                f"{where} has an anchor (^ or $) at or before character {piece.start() + 1}, which is no end "
                "of it; leave it out: the expression matches a text as a whole"
            )


def unsupported(message: str) -> InvalidRequest:
    """A constraint could be read, and not enforced."""
    return InvalidRequest(message, "constraint_unsupported")


class _Anchors:
    """Whether anchors stand where they say nothing that is not so anyway: XGrammar reads none."""

    def __init__(self) -> None:
        self._first, self._over = True, False
        # Of each open group: whether it began first in the expression, and whether a choice in it was over.
        self._groups = [(True, False)]

    def take(self, piece: str, *, opens: bool) -> bool:
        """The next piece of an expression; whether it may stand there."""
        if piece == "^":
            return self._first
        if piece == "$":
            self._over = True
            return True
        began, over = self._groups[-1]
        if piece == "|":
            self._groups[-1] = (began, over or self._over)
            self._first, self._over = began, False
            return True
        if piece == ")" and len(self._groups) > 1:
            self._groups.pop()
            self._first, self._over = False, over or self._over
            return True
        if self._over:
            return False
        if opens:
            self._groups.append((self._first, False))
        else:
            self._first = False
        return True
