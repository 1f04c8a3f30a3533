"""A model's files from a Hugging Face hub, on this machine before anything loads them.

Invariants: what is here whole is taken without asking the hub, so a restart needs no network and has the
same weights. A hub that is away is waited for, PATIENCE_S at most; what waiting does not change is refused.
"""

from __future__ import annotations

import errno
import json
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from services.common.contract.errors import InvalidRequest, Unavailable
from services.common.storage.model_path import check_model_path

log = logging.getLogger(__name__)

PATIENCE_S = 1800.0
"""How long a hub is waited for that does not answer, or breaks off."""
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
_WANTED = ("*.json", "*.safetensors", "*.model", "*.tiktoken", "*.txt", "*.jinja")
_UNWANTED = ("*/*", "consolidated*")
"""What else a repository may have of the same weights."""
_CURE = (
    "see that this machine reaches it, name another one in HF_ENDPOINT, or serve a directory with the "
    "model's files"
)
_INDEX = "model.safetensors.index.json"
_LOGIN = (401, 403, 404)
"""Statuses by which a hub says that it has no such model, or none for whoever asks."""
_LATER = (408, 429)
"""Statuses below 500 that pass."""


def model_directory(
    model: str,
    sleep: Callable[[float], object] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> str:
    """The directory with a base model's files. Blocking: a download takes minutes, a hub that is away longer.

    Args:
        model: directory, or hub id.

    Raises:
        InvalidRequest: there is no such directory, or no such model on the hub, or not for this user, or its
            files are not those of a model that is served.
        Unavailable: the hub did not come back within PATIENCE_S, or the disk is full.
    """
    if Path(model).is_absolute() or Path(model).is_dir():
        check_model_path(model)
        return model
    if found := kept(model):
        return str(found)
    return str(_downloaded(model, sleep, clock))


def kept(model: str) -> Path | None:
    """Where this machine keeps the files of a hub's model, if it has all of them. Asks no hub."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        found = snapshot_download(
            model, allow_patterns=[*_WANTED], ignore_patterns=[*_UNWANTED], local_files_only=True
        )
    except (HFValidationError, LocalEntryNotFoundError):
        return None
    # Where it was not put there as a whole, nothing lists what belongs to it.
    here = Path(found)
    return here if not lacks(here) and any(here.glob("*tok*")) else None


def lacks(directory: Path) -> str:
    """What of a model's configuration and weights a directory does not have; empty = nothing."""
    if not (directory / "config.json").is_file():
        return "config.json"
    if not (directory / _INDEX).is_file():
        return "" if any(directory.glob("*.safetensors")) else "weights as safetensors"
    named = set(json.loads((directory / _INDEX).read_text())["weight_map"].values())
    return next((name for name in sorted(named) if not (directory / name).is_file()), "")


def refusal(model: str, error: BaseException) -> InvalidRequest | None:
    """What to say of a model that a hub does not give and will not; None = it may later. Pure.

    Args:
        error: of huggingface_hub.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    hub = constants.ENDPOINT
    for each in _causes(error):
        match each:
            case HFValidationError():
                return InvalidRequest(
                    f"{model!r} is neither a directory here nor a model's id on {hub}: {each}"
                )
            case OfflineModeIsEnabled():
                return _offline(model, hub)
            case GatedRepoError():
                return InvalidRequest(
                    f"{hub} gives {model} only to those whom it has let in: ask for that at {hub}/{model}, "
                    "and set HF_TOKEN to a token of that account"
                )
            case RepositoryNotFoundError():
                return InvalidRequest(_nothing_for_you(model, hub))
            case HfHubHTTPError() if each.response.status_code in _LOGIN:
                return InvalidRequest(_nothing_for_you(model, hub))
            case HfHubHTTPError() if (
                each.response.status_code < 500 and each.response.status_code not in _LATER
            ):
                return InvalidRequest(f"{hub} does not give {model}: {_first_line(each)}")
    return None


def _offline(model: str, hub: str) -> InvalidRequest:
    return InvalidRequest(
        f"{model} is not here with all files, and HF_HUB_OFFLINE keeps this machine from asking {hub}: unset "
        f"it, or put the model here with `hf download {model}`"
    )


def _nothing_for_you(model: str, hub: str) -> str:
    return (
        f"{hub} has no model {model}, or none for whoever is not logged in: correct its id, or set HF_TOKEN "
        "to a token that may read it"
    )


def _downloaded(model: str, sleep: Callable[[float], object], clock: Callable[[], float]) -> Path:
    from huggingface_hub import constants

    deadline = clock() + PATIENCE_S
    pause = _FIRST_PAUSE_S
    while True:
        try:
            return _fetched(model)
        except _Away as away:
            said = (
                f"the model hub {constants.ENDPOINT} is away ({away}), and {model} is not here with all files"
            )
            if clock() + pause > deadline:
                waited = f"it was waited for {PATIENCE_S / 60:.0f} minutes"
                raise Unavailable(f"{said}: {waited}; {_CURE}") from away
        level = logging.WARNING if pause == _FIRST_PAUSE_S else logging.INFO
        log.log(level, "%s: it is asked again for up to %.0f minutes; %s", said, PATIENCE_S / 60, _CURE)
        sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)


class _Away(Exception):
    """The hub does not answer, or broke off."""


def _fetched(model: str) -> Path:
    """Asks the hub once.

    Raises:
        InvalidRequest, Unavailable: as `model_directory`.
        _Away: it may give the model later.
    """
    import httpx2
    from huggingface_hub import constants, snapshot_download

    try:
        found = Path(snapshot_download(model, allow_patterns=[*_WANTED], ignore_patterns=[*_UNWANTED]))
    # Its fast transfer says of everything that it is a RuntimeError.
    except (OSError, ValueError, RuntimeError, httpx2.HTTPError) as error:
        if here := _kept_in_part(error):
            log.warning("%s is loaded as it is here, for %s does not give it", model, constants.ENDPOINT)
            return here
        if refused := refusal(model, error):
            raise refused from error
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            cache = constants.HF_HUB_CACHE
            raise Unavailable(
                f"there is no room for {model} in {cache}: make some, or set HF_HOME"
            ) from error
        raise _Away(_first_line([*_causes(error)][-1])) from error
    missing = lacks(found)
    if missing and constants.is_offline_mode():
        raise _offline(model, constants.ENDPOINT)
    if missing and _is_listed(model):
        raise InvalidRequest(f"{model} on {constants.ENDPOINT} has no {missing}: serve a model that has it")
    if missing:
        raise _Away("it does not list the model's files")
    return found


def _is_listed(model: str) -> bool:
    """Whether the hub has told what belongs to a model that is here. Where it does not answer, and never has
    told, huggingface_hub takes for the model whatever is here of it."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        get_cached_repo_tree(model)
    except CachedRepoTreeNotFoundError:
        return False
    return True


def _kept_in_part(error: BaseException) -> Path | None:
    """Where a model is whose configuration and weights are here, though not all that the hub has of it."""
    from huggingface_hub.errors import IncompleteSnapshotError

    for each in _causes(error):
        if isinstance(each, IncompleteSnapshotError) and not lacks(Path(each.snapshot_path)):
            return Path(each.snapshot_path)
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error, what it came of, what that came of, and so on."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
