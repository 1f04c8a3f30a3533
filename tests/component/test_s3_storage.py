"""Storage in an object store that speaks S3 over HTTP."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.common.storage.base import Key, Storage
from services.common.storage.data_dir import DataDir
from services.common.storage.location import connect
from tests.unit.common.storage import stored
from tests.unit.common.storage.stored import KEY, MODEL, text


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """A bucket of a server, which the environment tells about."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "testing")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        boto3.client("s3").create_bucket(Bucket="checkpoints")
        yield "checkpoints"
    server.stop()


@pytest.fixture
def storage(bucket: str, tmp_path: Path) -> Storage:
    return connect(f"s3://{bucket}/{uuid.uuid4().hex}", DataDir(tmp_path))


def objects(bucket: str) -> list[str]:
    import boto3

    found = boto3.client("s3").list_objects_v2(Bucket=bucket).get("Contents", [])
    return sorted(entry["Key"] for entry in found)


@pytest.mark.parametrize(
    "check", [value for name, value in vars(stored).items() if name.startswith("check_")]
)
def test_it_does_what_storage_does(storage: Storage, check: Callable[[Storage], None]) -> None:
    check(storage)


def test_what_another_process_did_is_seen_at_once(bucket: str, tmp_path: Path) -> None:
    location = f"s3://{bucket}/{uuid.uuid4().hex}"
    writer, reader = (connect(location, DataDir(tmp_path / name)) for name in ("writer", "reader"))
    assert reader.versions(MODEL, "weights/a") == []
    writer.publish(KEY, {"x": text("one")})
    assert reader.versions(MODEL, "weights/a") == [3]
    writer.publish(Key(MODEL, "weights/a", 4), {"x": text("two")})
    assert reader.versions(MODEL, "weights/a") == [3, 4]
    reader.delete(KEY)
    assert writer.versions(MODEL, "weights/a") == [4]


def test_a_sweep_leaves_nothing_of_what_was_deleted(storage: Storage, bucket: str) -> None:
    before = objects(bucket)
    storage.publish(KEY, {"x": text("one")})
    assert storage.delete(KEY)
    storage.clean()
    assert len(objects(bucket)) == len(before) + 3
    assert storage.delete(KEY, grace=-1) is None
    assert objects(bucket) == before


def test_a_bucket_that_is_not_there_is_an_error(bucket: str, tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"[Bb]ucket"):
        connect("s3://no-such-bucket/x", DataDir(tmp_path)).publish(KEY, {"x": text("one")})
