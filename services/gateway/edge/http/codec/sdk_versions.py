"""What a client is told that depends on the versions of the tinker SDK and of Python that it runs on.

Invariant: a version that nothing can be done with is refused before anything is done; one of which some
methods are not served learns which, and what to upgrade to. docs/compatibility.md has what was tried. What
is no version, or none at all, is a client of its own making, which nothing is known to be missing of.
"""

from __future__ import annotations

import re

from services.common.contract.errors import InvalidRequest

_VERSION = re.compile(r"(\d{1,4})\.(\d{1,4})(?:\..*)?")
_SAMPLES = (0, 20)
_KNOWS_EXPORTS = (0, 28)
_EXCHANGES_KEYS = (0, 38)
_PARKS_THREADS = (3, 14)


def warning(sdk_version: str) -> str | None:
    """What to tell the user of a version, if anything.

    Raises:
        InvalidRequest: it cannot be served; says what to upgrade to.
    """
    version = _parsed(sdk_version)
    if version < _SAMPLES:
        raise InvalidRequest(
            f"tinker {sdk_version[:50]} cannot read this cluster's results; pip install -U 'tinker>=0.28' (a "
            "client that is not the SDK leaves sdk_version out)",
            "sdk_too_old",
        )
    if version < _KNOWS_EXPORTS:
        return (
            f"tinker {sdk_version[:50]} knows no exports, so lists of checkpoints leave them out; "
            "pip install -U 'tinker>=0.28'"
        )
    return None


def knows_exports(sdk_version: str) -> bool:
    """Whether this version of the SDK can read a list of checkpoints that has exports in it."""
    return _parsed(sdk_version) >= _KNOWS_EXPORTS


def exchanges_keys(sdk_version: str) -> bool:
    """Whether this version of the SDK exchanges its key for a token, and was tried so."""
    return _parsed(sdk_version) >= _EXCHANGES_KEYS


def may_use_pyqwest(python_version: str) -> bool:
    """Whether programs of this Python end as they should with the transport that the SDK prefers.

    When a program ends, a thread of pyqwest may be about to hold Python's lock. CPython before 3.14 ends such
    a thread through frames of Rust, and glibc aborts the process, all of whose work is done: an exit status
    of 134, which whatever runs it takes for a failure (curioswitch/pyqwest#164, python/cpython#87135).
    """
    match = _VERSION.fullmatch(python_version)
    return match is not None and (int(match[1]), int(match[2])) >= _PARKS_THREADS


def _parsed(sdk_version: str) -> tuple[int, int]:
    """(major, minor); that of a version that can do all when it is none."""
    match = _VERSION.fullmatch(sdk_version)
    return (int(match[1]), int(match[2])) if match else _KNOWS_EXPORTS
