"""What the installed tinker SDK offers: found by looking, never listed by hand."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Iterator
from pathlib import Path

import click
import tinker
from tinker import types
from tinker.cli.__main__ import main_cli

CLIENTS = (
    tinker.ServiceClient,
    tinker.TrainingClient,
    tinker.SamplingClient,
    tinker.RestClient,
    tinker.AdminClient,
    tinker.APIFuture,
)
SETTINGS = (types.SamplingParams, types.AdamParams)
"""Types whose every field asks the server for something by itself."""
_ASYNC = "_async"
_ENVIRONMENT = re.compile(r"""(?:environ\.get|environ|getenv)[(\[]\s*["']([A-Z][A-Z0-9_]+)["']""")


def has_async(client: type, method: str) -> bool:
    """Whether a method has a twin to await."""
    return hasattr(client, method + _ASYNC)


def methods() -> dict[str, list[str]]:
    """Parameters of every public method and property of every client, by "Client.method". A twin that is
    awaited counts with the method that it repeats."""
    found = {}
    for client in CLIENTS:
        for name, member in inspect.getmembers(client):
            twin_of = name.removesuffix(_ASYNC)
            if not name.startswith("_") and (twin_of == name or not hasattr(client, twin_of)):
                found[f"{client.__name__}.{name}"] = _parameters(member)
    for name in tinker.auth.__all__:
        found[f"auth.{name}"] = _parameters(getattr(tinker.auth, name))
    return found


def constructors() -> dict[str, list[str]]:
    """Parameters of the clients that a user makes, by name."""
    made = (tinker.ServiceClient, tinker.RestClient, tinker.AdminClient)
    return {f"{client.__name__}()": _parameters(client.__init__) for client in made}


def choices() -> dict[str, list[str]]:
    """Every value that the SDK knows of what can be chosen by name or type."""
    chunks = typing.get_args(typing.get_args(types.ModelInputChunk)[0])
    optimizers = [
        name for name in dir(types) if name.endswith("OptimizerConfig") and name != "OptimizerConfig"
    ]
    return {
        "loss_fn": list(typing.get_args(types.LossFnType)),
        "kind of sampling client": list(typing.get_args(types.SamplingClientKind)),
        "chunk": [chunk.__name__ for chunk in chunks],
        "optimizer": optimizers,
    }


def fields() -> dict[str, list[str]]:
    """Fields of the types in SETTINGS, by their names."""
    return {kind.__name__: list(kind.model_fields) for kind in SETTINGS}


def commands() -> dict[str, list[str]]:
    """Parameters of every command of the `tinker` command line, by its words."""
    return {" ".join(path): [str(p.name) for p in command.params] for path, command in _leaves(main_cli, [])}


def variables() -> list[str]:
    """Environment variables that the SDK's sources read."""
    root = Path(inspect.getfile(tinker)).parent
    sources = [path for path in root.rglob("*.py") if not path.name.endswith("_test.py")]
    return sorted({name for path in sources for name in _ENVIRONMENT.findall(path.read_text())})


def _parameters(member: object) -> list[str]:
    if not callable(member):
        return []
    parameters = inspect.signature(member).parameters.values()
    named = [one.name for one in parameters if one.kind is not inspect.Parameter.VAR_KEYWORD]
    return [name for name in named if name != "self" and not name.startswith("_")]


def _leaves(command: click.Command, path: list[str]) -> Iterator[tuple[list[str], click.Command]]:
    if not isinstance(command, click.Group):
        yield path, command
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        found = command.get_command(context, name)
        assert found is not None
        yield from _leaves(found, [*path, name])
