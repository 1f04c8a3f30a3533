"""Which storage a location means: a directory, or a URL of an object store.

Invariant: a location holds no secret. Credentials, regions and endpoints come from where the object store's
own library looks for them (for s3:// AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, a role of the machine, ...).
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from services.common.contract.errors import InvalidRequest
from services.common.storage.base import Storage
from services.common.storage.data_dir import DataDir
from services.common.storage.directory import DirectoryStorage


def check_location(location: str) -> str:
    """The location itself when it is empty, an absolute directory, or a URL with a bucket and no secret.

    Raises:
        InvalidRequest: it is not, or what reads URLs of its kind is not here.
    """
    url = urlsplit(location)
    if not url.scheme:
        if location and not Path(location).is_absolute():
            raise InvalidRequest(f"checkpoint store {location!r} is not an absolute path or a URL")
        return location
    if "@" in url.netloc or url.query:
        raise InvalidRequest(
            "the URL of the checkpoint store must not hold credentials or a query; give credentials in the "
            "environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL)"
        )
    if url.scheme == "file" or not url.netloc or "::" in location:
        raise InvalidRequest(
            f"checkpoint store {location!r} is neither an absolute path nor a URL such as s3://bucket/prefix"
        )
    _check_kind(location, url.scheme)
    return location


def _check_kind(location: str, scheme: str) -> None:
    from fsspec.registry import known_implementations

    known = known_implementations.get(scheme)
    if known is None:
        raise InvalidRequest(
            f"checkpoint store {location!r}: no object store is called {scheme}; a URL is like s3://bucket/prefix"
        )
    package = known["class"].partition(".")[0]
    if find_spec(package) is None:
        raise InvalidRequest(
            f"checkpoint store {location!r} needs the package {package}, which is not installed"
        )


def connect(location: str, data: DataDir) -> Storage:
    """The storage of a location; empty: the data directory's own.

    Raises:
        InvalidRequest: the location is malformed, or what its kind needs is not installed.
    """
    check_location(location)
    if "://" not in location:
        return DirectoryStorage(Path(location) if location else data.checkpoints)
    from fsspec.core import url_to_fs

    from services.common.storage.object_store import ObjectStorage

    try:
        filesystem, root = url_to_fs(location, use_listings_cache=False)
    except (ImportError, ValueError) as error:
        raise InvalidRequest(f"checkpoint store {location!r} cannot be used: {error}") from error
    return ObjectStorage(filesystem, root, data.staging)
