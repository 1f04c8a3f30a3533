"""`tinsmith tokenizer`: puts a served tokenizer where the tinker SDK and tinker-cookbook look for it.

Both load a tokenizer by the name of the base model, and take a directory of that name below the working
directory before they ask a hub. Invariants: nothing is written outside of the directory that was asked for,
and a file is there whole or not at all; the key goes to the host that it was given for and to no other.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import quote, urlsplit

from services.common.contract.errors import InvalidRequest, TinsmithError, Unavailable

_MOST_BYTES = 256 << 20
_TIMEOUT_S = 60.0
_PART = re.compile(r"[0-9A-Za-z][0-9A-Za-z._+=@~-]*")
_KEY = re.compile(r"[!-~]+")
_LLAMA_3 = "meta-llama/Llama-3"
_LLAMA_3_TOKENIZER = "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer"


def place(name: str) -> Path:
    """Where the SDK looks for the tokenizer of a base model, below the working directory.

    Raises:
        InvalidRequest: the name is none that can be looked for.
    """
    plain = name.split(":")[0]
    if plain.startswith(_LLAMA_3):
        return Path(_LLAMA_3_TOKENIZER)
    # org/model/variant has the tokenizer of org/model.
    parts = plain.split("/")[:2] if plain.count("/") == 2 else plain.split("/")
    if len(parts) > 2 or not all(_PART.fullmatch(part) for part in parts):
        raise InvalidRequest(f"{name[:200]!r} is not the name of a base model, such as org/name")
    return Path(*parts)


def fetch(base_url: str, api_key: str, name: str) -> dict[str, str]:
    """The files of a tokenizer, from a cluster.

    Raises:
        TinsmithError: the cluster refuses, cannot be reached, or answers something else.
    """
    _check_base_url(base_url)
    if not _KEY.fullmatch(api_key):
        raise InvalidRequest("TINKER_API_KEY is no API key: one has visible ASCII characters only")
    url = f"{base_url.rstrip('/')}/api/v1/tokenizers/{quote(name, errors='replace')}"
    request = urllib.request.Request(url, headers={"x-api-key": api_key})
    try:
        with urllib.request.build_opener(_NoRedirects).open(request, timeout=_TIMEOUT_S) as reply:
            data = reply.read(_MOST_BYTES + 1)
    except urllib.error.HTTPError as error:
        raise InvalidRequest(f"{url}: {_detail(error)}") from error
    except urllib.error.URLError as error:
        raise Unavailable(f"{base_url} does not answer: {error.reason}; is TINKER_BASE_URL right?") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise Unavailable(f"{url} cannot be read: {error}") from error
    if len(data) > _MOST_BYTES:
        raise TinsmithError(f"{url} answers more than {_MOST_BYTES} bytes")
    return _files(url, data)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Takes a redirect for an answer that is none: it would be followed with the key."""

    def redirect_request(self, *_: object) -> None:
        return None


def _check_base_url(base_url: str) -> None:
    try:
        parts = urlsplit(base_url)
        served = parts.scheme in ("http", "https") and bool(parts.hostname) and base_url.isascii()
        # Reading the port checks it.
        served = served and parts.port != 0
    except ValueError:
        served = False
    if not served:
        raise InvalidRequest(f"{base_url[:200]!r} is not the URL of a cluster; set TINKER_BASE_URL")


def write(files: dict[str, str], directory: Path) -> None:
    """Writes files below a directory, which is made.

    Raises:
        OSError: it cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        descriptor, temporary = tempfile.mkstemp(dir=directory, prefix=f".{name}-")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(content)
            Path(temporary).chmod(0o644)
            Path(temporary).replace(directory / name)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


def run(base_url: str | None, api_key: str | None, name: str, directory: Path) -> str:
    """Fetches and writes; what to say about it.

    Raises:
        TinsmithError: it cannot be had, or not be written.
    """
    if not base_url or not api_key:
        raise InvalidRequest("set TINKER_BASE_URL and TINKER_API_KEY, as `tinsmith up` prints them")
    target = directory / place(name)
    files = fetch(base_url, api_key, name)
    try:
        write(files, target)
    except (OSError, UnicodeError) as error:
        raise Unavailable(f"{target} cannot be written: {error}") from error
    return f"wrote the tokenizer of {name} to {target}; programs that run in {directory} load it by its name"


def _files(url: str, data: bytes) -> dict[str, str]:
    try:
        files = json.loads(data)["files"]
        found = {str(name): str(content) for name, content in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Unavailable(
            f"{url} answers something that is no tokenizer; is it a Tinsmith cluster?"
        ) from error
    if not all(_PART.fullmatch(name) for name in found):
        raise Unavailable(f"{url} names files that cannot be written")
    return found


def _detail(error: urllib.error.HTTPError) -> str:
    if error.code // 100 == 3:
        to = str(error.headers.get("location", "elsewhere"))[:200]
        return (
            f"it redirects to {to!r}, where the API key is not sent; set TINKER_BASE_URL to the cluster's own"
        )
    try:
        return str(json.loads(error.read(1 << 16))["detail"])
    except (ValueError, KeyError, TypeError, OSError, RecursionError):
        return f"HTTP {error.code}"
