"""Command lines as tables: one row a flag.

Invariants: every flag `--some-flag` can be given as the variable TINSMITH_SOME_FLAG instead; each says what
it takes, in which unit and range, and is checked against that; all mistakes are told at once; a default is
that of the settings that the flag belongs to.
"""

from __future__ import annotations

import argparse
import ipaddress
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from services.common.contract.errors import TinsmithError

T = TypeVar("T")


@dataclass(frozen=True)
class Kind:
    """What a flag takes.

    Attributes:
        says: what it must be, as in "must be ...".
        unit: of what it is a number, or what it is, as shown in place of its value.
        parse: its value; a ValueError, whose text is not used, when it is none, or a TinsmithError that says
            what it must be itself.
        range: the values it may have, for the help; empty: that is not to be told in few words.
    """

    says: str
    unit: str
    parse: Callable[[str], Any]
    range: str = ""


def number(least: int, most: int, unit: str = "") -> Kind:
    """A whole number of something."""

    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit()) or len(text) > 20 or not least <= int(text) <= most:
            raise ValueError
        return int(text)

    of = f" of {unit}" if unit else ""
    return Kind(
        f"a whole number{of}, {least} to {most}",
        unit if unit == "MiB" else unit.upper() or "N",
        parse,
        f"{least} to {most}",
    )


def decimal(least: float, most: float, unit: str = "") -> Kind:
    """A number of something, which need not be whole."""

    def parse(text: str) -> float:
        if not least <= (value := float(text)) <= most:
            raise ValueError
        return value

    of, range_ = f" of {unit}" if unit else "", f"{least:.10g} to {most:.10g}"
    return Kind(f"a number{of}, {range_}", unit.upper() or "X", parse, range_)


def one_of(words: Sequence[str]) -> Kind:
    """One of a few words."""

    def parse(text: str) -> str:
        if text not in words:
            raise ValueError
        return text

    return Kind(f"one of {', '.join(words)}", "|".join(words), parse)


_YEARS_10 = 10 * 365 * 24 * 3600
_PIB = 1 << 50

TEXT = Kind("text", "TEXT", str)
PATH = Kind("a path", "PATH", lambda text: Path(text) if text else Path())
PORT = Kind("a port number, 0 to 65535", "PORT", number(0, 65535).parse, "0 to 65535")
MODEL = Kind(
    "NAME=PATH or NAME=<a hub's id>, for example Qwen/Qwen3-4B=/models/qwen3-4b",
    "NAME=PATH",
    lambda text: _model(text),
)
HTTP_URL = Kind("an http(s) URL without credentials or query", "URL", lambda text: _http_url(text))
PROXIES = Kind("addresses or networks with commas between", "ADDRESSES", lambda text: _networks(text))
SWITCH = Kind("yes or no", "yes|no", lambda text: ("no", "yes").index(text) == 1)
SECONDS = number(1, _YEARS_10, "seconds")
BYTES = number(1, _PIB, "bytes")
BYTES_OR_0 = number(0, _PIB, "bytes")


def _model(text: str) -> tuple[str, str]:
    name, _, path = text.partition("=")
    if not (name and path):
        raise ValueError
    return name, path


def _networks(text: str) -> tuple[str, ...]:
    return tuple(str(ipaddress.ip_network(part.strip(), strict=False)) for part in text.split(",") if text)


def _http_url(text: str) -> str:
    url = urlsplit(text)
    surplus = url.query or url.fragment or "@" in url.netloc
    if text and (url.scheme not in ("http", "https") or not url.netloc or surplus):
        raise ValueError
    return text.rstrip("/")


@dataclass(frozen=True)
class Flag:
    """One row.

    Attributes:
        name: with its dashes.
        kind: what it takes.
        settings: the dataclass that it is a field of, which has defaults.
        field: the field.
        help: what it does. Range, default and variable are added to it.
    """

    name: str
    kind: Kind
    settings: type
    field: str
    help: str

    @property
    def variable(self) -> str:
        return "TINSMITH_" + self.name.removeprefix("--").replace("-", "_").upper()

    @property
    def option(self) -> str:
        """Its attribute in what argparse returns."""
        return self.name.removeprefix("--").replace("-", "_")

    @property
    def default(self) -> str:
        value = getattr(self.settings(), self.field)
        if value is None:
            return "auto"
        if value in ((), Path()):
            return ""
        if isinstance(value, bool):
            return "yes" if value else "no"
        return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)

    @property
    def described(self) -> str:
        """Its help, as argparse takes it."""
        taken = f"{self.kind.range}; " if self.kind.range else ""
        shown = self.default or "empty"
        return f"{self.help} ({taken}default: {shown}; {self.variable})".replace("%", "%%")


Table = Mapping[str, Sequence[Flag]]


@dataclass
class Given:
    """What a command line comes to: the fields of each dataclass in the table.

    Attributes:
        mistakes: sentences; what is mistaken has its default. `of` is of use without them only.
    """

    fields: dict[type, dict[str, Any]] = field(default_factory=dict)
    mistakes: list[str] = field(default_factory=list)

    def of(self, kind: type[T], **more: Any) -> T:
        """The settings of this class; `more`: fields that are no flags."""
        settings: Any = kind()
        return replace(settings, **self.fields.get(kind, {}), **more)


def parser(
    prog: str, description: str | None, table: Table, environment: Mapping[str, str]
) -> argparse.ArgumentParser:
    """A parser of the table's flags, which are in groups with headings."""
    made = argparse.ArgumentParser(prog=prog, description=description, allow_abbrev=False)
    for heading, rows in table.items():
        group = made.add_argument_group(heading)
        for flag in rows:
            default = environment.get(flag.variable, flag.default)
            group.add_argument(flag.name, default=default, metavar=flag.kind.unit, help=flag.described)
    return made


def given(made: argparse.ArgumentParser, table: Table, argv: Sequence[str]) -> Given:
    """What the words come to. Exits when a flag has no value, or help is asked for."""
    options, unknown = made.parse_known_args(argv)
    found = Given(mistakes=[f"{word!r} is no flag" for word in unknown])
    for flag in rows_of(table):
        text = getattr(options, flag.option)
        try:
            found.fields.setdefault(flag.settings, {})[flag.field] = flag.kind.parse(text)
        except ValueError:
            found.mistakes.append(f"{flag.name} must be {flag.kind.says}, not {text!r}")
        except TinsmithError as error:
            found.mistakes.append(f"{flag.name}: {error.message}")
    return found


def refuse(made: argparse.ArgumentParser, mistakes: Sequence[str]) -> None:
    """Exits with all mistakes, a line each, if there are any."""
    if mistakes:
        made.error("\n  ".join(["the command line has mistakes:", *mistakes]))


def rows_of(table: Table) -> Iterator[Flag]:
    """The flags, without their headings."""
    for rows in table.values():
        yield from rows
