"""What a command line, a file and the environment say, each setting once: the flag, else the file, else
the variable, else the default.

Invariant: reading never stops at the first mistake.
"""

from __future__ import annotations

import argparse
import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.common.contract import variables
from services.launcher.settings.setting import Setting
from services.launcher.settings.table import ROWS, TABLE

MODEL_VARIABLE = variables.PREFIX + "MODEL"


@dataclass
class Given:
    """What is to be done.

    Attributes:
        values: by the name of the setting; defaults where nothing was given, or something wrong.
        models: NAME=SOURCE, as given.
        models_from: where they were given, as a sentence about one of them begins.
        mistakes: sentences that say what to change.
        wrong: settings that were given something wrong.
    """

    values: dict[str, Any] = field(default_factory=dict)
    models: list[str] = field(default_factory=list)
    models_from: str = "--model"
    mistakes: list[str] = field(default_factory=list)
    wrong: set[str] = field(default_factory=set)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for every setting, in groups."""
    for heading, rows in TABLE.items():
        group = parser.add_argument_group(heading)
        for row in rows:
            group.add_argument(row.flag, metavar=row.kind.unit, help=row.help)


def read(
    options: argparse.Namespace, models: Sequence[str], file: Path | None, environment: Mapping[str, str]
) -> Given:
    """Everything that was given, checked one by one.

    Args:
        options: what the flags of `add_flags` say, and in `unknown` the words that are none.
        models: NAME=SOURCE of each --model; they take the place of the file's, and those of the variable's.
        file: a TOML file with a key for each setting and a table `models` of NAME = SOURCE.
    """
    given = Given()
    written = _written(file, given) if file is not None else {}
    in_file = written.pop("models", {})
    if models:
        given.models = list(models)
    elif in_file != {}:
        given.models, given.models_from = _models(in_file, file, given), f"{file}:"
    else:
        given.models = re.findall(r"[^\s,]+", environment.get(MODEL_VARIABLE, ""))
        given.models_from = f"{MODEL_VARIABLE}:"
    given.mistakes += unknown_flags(options.unknown)
    given.mistakes += variables.mistakes(environment)
    for name in sorted(written.keys() - ROWS.keys()):
        near = difflib.get_close_matches(name, ROWS, n=1)
        hint = f"did you mean {near[0]}?" if near else "tinsmith up --help lists them"
        given.mistakes.append(f"{file}: there is no setting {name}; {hint}")
    for name, row in ROWS.items():
        flag = getattr(options, name.replace("-", "_"))
        if flag is not None:
            value = _value(row, flag, row.flag, given)
        elif name in written:
            value = _value(row, written[name], f"{name} in {file}", given)
        elif row.variable in environment:
            value = _value(row, environment[row.variable], row.variable, given)
        else:
            value = row.default
        given.values[name] = value
    return given


def unknown_flags(words: Sequence[str]) -> list[str]:
    """What to change about words that are no flags.

    Args:
        words: in their order; what stands behind one that looks like a flag is taken for its value.
    """
    flags = [*(row.flag for row in ROWS.values()), "--model", "--file", "--dry-run", "--verbose"]
    found, before = [], ""
    for word in words:
        if word.startswith("-"):
            near = difflib.get_close_matches(word.partition("=")[0], flags, n=1)
            hint = f"; did you mean {near[0]}?" if near else "; tinsmith up --help lists them"
            found.append(f"{word!r} is no flag of tinsmith up{hint}")
        elif not before.startswith("-") or "=" in before:
            found.append(f"{word!r} belongs to no flag of tinsmith up")
        before = word
    return found


def _value(row: Setting, value: Any, origin: str, given: Given) -> Any:
    # A boolean is a number in Python, and none to its writer.
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        try:
            return row.kind.parse(str(value))
        except ValueError:
            pass
    given.mistakes.append(f"{origin} must be {row.kind.says}, not {value!r}")
    given.wrong.add(row.name)
    return row.default


def _written(file: Path, given: Given) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text())
    except OSError as error:
        given.mistakes.append(f"{file} cannot be read: {error.strerror}")
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        given.mistakes.append(f"{file} is not TOML: {error}")
    return {}


def _models(table: Any, file: Path | None, given: Given) -> list[str]:
    if not isinstance(table, dict):
        given.mistakes.append(
            f"models in {file} must be a table of names and sources, for example\n"
            '    [models]\n    "Qwen/Qwen3-8B" = "/models/qwen3-8b"'
        )
        return []
    found = []
    for name, source in table.items():
        if name in ROWS:
            # In TOML whatever follows the line [models] is in it.
            given.mistakes.append(f"{file}: {name} stands below [models]; a setting stands above that line")
        elif not isinstance(source, str):
            given.mistakes.append(
                f"{file}: the model {name!r} must have a directory or hub id in quotes, not {source!r}"
            )
        else:
            found.append(f"{name}={source}")
    return found
