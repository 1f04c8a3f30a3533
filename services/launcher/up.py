"""`tinsmith up`: one cluster on this machine, from an empty directory to a clean end.

Invariant: one cluster per data directory (a lock file), and when `up` has returned, however it
ended, no process of the cluster is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
import secrets
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import redis.asyncio
from redis.exceptions import RedisError

from services.common.contract.errors import Unavailable
from services.common.process.periodic import Periodic
from services.common.process.process import keep_files_private, machine_memory, wait_for_signal
from services.common.process.tasks import cancel_all
from services.common.state import redis_client, registry
from services.common.storage.data_dir import NAMES, DataDir
from services.common.tls.wires import ROLES, Role
from services.gateway.identity import keys_file
from services.gateway.identity.key import PREFIX
from services.launcher import default_model, machine, plan, redis_server
from services.launcher.certificates import authority
from services.launcher.doctor import command as doctor
from services.launcher.doctor import facts
from services.launcher.progress import Endpoint, Progress
from services.launcher.supervisor import Supervisor
from services.trainer.world.launch import launch_command, node_command

FIRST_OWNER = "operator"
"""Owner of what is made with the first API key."""
REDIS_START_S = 20.0
_POLL_S = 0.3
_PREVIOUS_RUN_S = 120.0
_RENEWAL_S = 3600.0
_RENEWAL_DEADLINE_S = 60.0


def up(options: plan.Options, redis_url: str | None, verbose: bool) -> int:
    """Runs a cluster until SIGINT, SIGTERM or SIGHUP; the exit status.

    Raises:
        Unavailable: the directory or a port is in use, or a process cannot be started.
    """
    data = DataDir(options.data_dir)
    keep_files_private()
    make_directory(data)
    options = _with_models(options)
    with _lock(data.root):
        _wait_for_previous_run(data)
        if taken := machine.in_use(plan.listeners(options)):
            raise Unavailable("; ".join(taken.values()))
        key = api_key(data.api_key)
        for old in data.logs.glob("*.log"):
            old.replace(old.with_suffix(".log.1"))
        return asyncio.run(_run(options, data, key, redis_url, verbose))


def make_directory(data: DataDir) -> None:
    """Makes the data directory, or keeps one that holds nothing but a cluster's things to its user. Of one
    with other things in it, which somebody may share, it only says that others come to it.

    Raises:
        Unavailable: it cannot be made.
    """
    try:
        data.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = stat.S_IMODE(data.root.stat().st_mode)
        others = sorted({entry.name for entry in data.root.iterdir()} - NAMES)
        if mode & 0o077 and not others:
            data.root.chmod(0o700)
        elif mode & 0o077:
            print(
                f"other users of this machine come to {data.root} (mode {mode:03o}), which is left so "
                f"because it holds more than a cluster's things, such as {others[0]!r}: run `chmod 700` "
                "on it, or choose another --data-dir",
                file=sys.stderr,
                flush=True,
            )
        for directory in (data.run, data.logs):
            directory.mkdir(exist_ok=True)
    except OSError as error:
        raise Unavailable(
            f"{data.root} cannot be the data directory: {error.strerror or error}; choose another with "
            "--data-dir"
        ) from error


def show(options: plan.Options) -> str:
    """What a cluster is made of, where it computes, and what may not fit there, a line each."""
    if not options.models:
        options = replace(options, models=(plan.Model(default_model.NAME, default_model.NAME),))
    planned = plan.processes(options, _trainer_command(options))
    lines = [f"{process.name:<12}{process.computes or 'CPU'}" for process in planned]
    lines += doctor.doubts(options, facts.gather(options.data_dir))
    lines += plan.followers(options, planned)
    return "\n".join([*(f"serves {model.name} from {model.source}" for model in options.models), *lines])


def _trainer_command(options: plan.Options) -> plan.TrainerCommand:
    head = plan.nodes(options)
    if head is None:
        return launch_command
    return lambda ranks, arguments: node_command(head, ranks, arguments)


def _with_models(options: plan.Options) -> plan.Options:
    """The options with the default model, when none was named."""
    if options.models:
        return options
    cache = options.data_dir / "cache"
    if not default_model.is_ready(cache):
        print(f"preparing {default_model.NAME} (half a minute, once)", flush=True)
    model = plan.Model(default_model.NAME, default_model.prepare(cache))
    return replace(options, models=(model,))


async def _run(options: plan.Options, data: DataDir, key: str, redis_url: str | None, verbose: bool) -> int:
    stop = asyncio.create_task(wait_for_signal(), name="signals")
    supervisor = Supervisor(data.logs, dict(os.environ) | {"PYTHONUNBUFFERED": "1"})
    progress = Progress(data.logs, verbose, plan.from_hub(options))
    renew = partial(asyncio.to_thread, authority.renew, data.tls)
    client: redis.asyncio.Redis | None = None
    ready: asyncio.Task[None] | None = None
    renewal = Periodic("renewal of certificates", _RENEWAL_S, renew, _RENEWAL_DEADLINE_S)
    try:
        if options.mtls == "on":
            await asyncio.to_thread(authority.prepare, data.tls)
            renewal.start()
        else:
            # `tinsmith status` goes by whether the operator's is there.
            try:
                await asyncio.to_thread(authority.remove, data.tls)
            except OSError as error:
                raise Unavailable(f"the certificates in {data.tls} cannot be removed: {error}") from error
        if redis_url:
            urls = dict.fromkeys(ROLES, redis_url)
        else:
            urls = await _start_redis(supervisor, data, options.redis_appendfsync)
        _write_secret(data.redis_url, urls["operator"])
        client = redis_client.connect(urls["operator"])
        await _wait_for_redis(client, supervisor)
        for running in supervisor.running.values():
            running.was_ready = True
        progress.note(await asyncio.to_thread(show, options))
        for note in plan.aliases(options):
            progress.note(note)
        progress.downloads()
        planned = plan.processes(options, _trainer_command(options))
        stages = [[_knowing_redis(process, urls) for process in stage] for stage in plan.stages(planned)]
        ready = asyncio.create_task(_start(stages, client, supervisor, progress), name="ready")
        await asyncio.wait({ready, stop}, return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            ready.result()
            endpoint = Endpoint(
                options.host, options.port, options.grpc_port, options.public_url, bool(options.tls_cert)
            )
            progress.ready(endpoint, key, options.models[0].name)
            await _watch(supervisor, progress, stop)
        return 0
    finally:
        progress.note("stopping: finishing what was accepted (Ctrl-C again to stop at once)")
        # It starts processes.
        await cancel_all([ready] if ready else [])
        if client is not None:
            await client.aclose()
        await _stop(supervisor)
        await renewal.stop()
        data.redis_url.unlink(missing_ok=True)
        (data.run / "redis-0.pid").unlink(missing_ok=True)
        progress.note("stopped")


async def _stop(supervisor: Supervisor) -> None:
    stopped = asyncio.create_task(supervisor.stop(), name="stop")
    asked_again = asyncio.create_task(wait_for_signal(), name="signals")
    await asyncio.wait({stopped, asked_again}, return_when=asyncio.FIRST_COMPLETED)
    if not stopped.done():
        supervisor.kill()
    await cancel_all([asked_again])
    await stopped


def _knowing_redis(process: plan.Process, urls: Mapping[Role, str]) -> plan.Process:
    """The process, with the URL of its role's user."""
    assert process.announces is not None
    url = urls[cast(Role, process.announces[0])]
    return replace(process, env={**process.env, "TINSMITH_REDIS_URL": url})


async def _start_redis(supervisor: Supervisor, data: DataDir, appendfsync: str) -> dict[Role, str]:
    memory = redis_server.memory_share(machine_memory())
    process, urls = redis_server.prepare(data.redis, machine.free_port(), appendfsync, memory)
    supervisor.on_spawn(process.name, lambda pid: (data.run / "redis-0.pid").write_text(f"{pid}\n"))
    await supervisor.start(process)
    return urls


async def _wait_for_redis(client: redis.asyncio.Redis, supervisor: Supervisor) -> None:
    deadline = time.monotonic() + REDIS_START_S
    while True:
        try:
            await client.ping()
            return
        except RedisError as error:
            supervisor.raise_failure()
            if time.monotonic() > deadline:
                raise Unavailable(f"Redis does not answer: {error}") from error
            await asyncio.sleep(0.1)


async def _start(
    stages: list[list[plan.Process]],
    client: redis.asyncio.Redis,
    supervisor: Supervisor,
    progress: Progress,
) -> None:
    """Starts processes, those of a stage when all before it are ready; returns when all are."""
    for stage in stages:
        for process in stage:
            await supervisor.start(process)
        await _until_ready(client, supervisor, progress)


async def _until_ready(client: redis.asyncio.Redis, supervisor: Supervisor, progress: Progress) -> None:
    """Returns when every process has announced itself since this start."""
    waiting = {
        running.process.announces: name
        for name, running in supervisor.running.items()
        if running.process.announces is not None and not running.was_ready
    }
    started = time.time()
    known = {record.incarnation for kind in registry.KINDS for record in await registry.live(client, kind)}
    while waiting:
        supervisor.raise_failure()
        for kind in registry.KINDS:
            for record in await registry.live(client, kind):
                name = waiting.get((kind, record.id))
                # A record that a killed predecessor left behind is not this process.
                if name is not None and record.incarnation not in known:
                    del waiting[(kind, record.id)]
                    supervisor.running[name].was_ready = True
                    progress.note(f"{name} is ready after {time.time() - started:.0f} s")
        progress.waiting(list(waiting.values()))
        await asyncio.sleep(_POLL_S)


async def _watch(supervisor: Supervisor, progress: Progress, stop: asyncio.Task[object]) -> None:
    while not stop.done():
        supervisor.raise_failure()
        progress.follow()
        await asyncio.wait({stop}, timeout=_POLL_S)


def api_key(path: Path) -> str:
    """The cluster's first API key, made when there is none. Its owner has a name, so that a new key with that
    name in its place still has what was made with the old one.

    Raises:
        Unavailable: the file holds no key, or something else.
    """
    if not path.exists():
        _write_secret(path, f"tml-{secrets.token_urlsafe(32)} {FIRST_OWNER} role=admin\n")
    text = path.read_text()
    wrong = keys_file.parse(text).wrong
    if wrong:
        number, why = wrong[0]
        raise Unavailable(f"{path}: line {number}: {why}{_cure(text.splitlines()[number - 1])}")
    found = [line.split()[0] for line in text.splitlines() if line.startswith(PREFIX)]
    if not found:
        raise Unavailable(f"{path} holds no API key; remove it, and a new one is made")
    return found[0]


def _cure(line: str) -> str:
    """What to write into a line with a key alone, as an earlier version made it: that named its owner so."""
    words = line.split()
    if len(words) != 1 or not words[0].startswith(PREFIX):
        return ""
    owner = f"key-{hashlib.sha256(words[0].encode()).hexdigest()[:12]}"
    return f"; to keep what was made with the key, write after it in that line: {owner} role=admin"


def _write_secret(path: Path, text: str) -> None:
    path.touch(mode=0o600)
    path.chmod(0o600)
    path.write_text(text)


@contextlib.contextmanager
def _lock(root: Path) -> Iterator[None]:
    with (root / "run" / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Unavailable(
                f"a cluster already runs on {root}; stop it or choose another --data-dir"
            ) from error
        yield


def _wait_for_previous_run(data: DataDir) -> None:
    """Waits for the processes of an `up` that was killed: told so by the kernel, they are draining."""
    deadline = time.monotonic() + _PREVIOUS_RUN_S
    told = False
    while names := machine.running(data.run):
        if not told:
            print(f"waiting for the previous run to end: {', '.join(names)}", flush=True)
            told = True
        if time.monotonic() > deadline:
            raise Unavailable(
                f"{', '.join(names)} of a previous run do not end; their pids are in {data.run}"
            )
        time.sleep(_POLL_S)
    for path in data.run.glob("*.pid"):
        path.unlink(missing_ok=True)
