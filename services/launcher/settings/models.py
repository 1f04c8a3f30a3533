"""A base model as it is given: a name, and where its weights are."""

from __future__ import annotations

from pathlib import Path

from services.common.contract.errors import InvalidRequest
from services.launcher.plan import Model


def parse_model(text: str, origin: str = "--model") -> Model:
    """ "NAME=PATH_OR_HUB_ID"; a path is made absolute.

    Args:
        origin: where it was given, as what is said of it begins.

    Raises:
        InvalidRequest: another form, or a path without a model.
    """
    name, separator, source = text.partition("=")
    if not (name and separator and source):
        # What looks like a hub id most likely is one, and its own name is a good one.
        alone = not separator and name.count("/") == 1 and not name.startswith(("/", ".", "~"))
        hint = f"did you mean {name}={name}?" if alone else "for example my/model=./model-dir"
        raise InvalidRequest(f"{origin} {text!r} is not NAME=PATH_OR_HUB_ID; {hint}")
    path = Path(source).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InvalidRequest(f"{origin} {text!r}: {path} holds no model: it has no config.json")
        return Model(name, str(path.resolve()))
    if source.startswith(("/", ".", "~")) or source.count("/") > 1:
        raise InvalidRequest(f"{origin} {text!r}: there is no directory {path}")
    return Model(name, source)
