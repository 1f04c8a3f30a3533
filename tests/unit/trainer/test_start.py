"""Settings, the launch command, and agreement between ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch

from services.common.contract.errors import Internal, InvalidRequest, TinsmithError
from services.common.worlds.sharding import Sharding
from services.launcher.machine import free_port
from services.trainer import config
from services.trainer.compute.base_model import init_distributed
from services.trainer.server import load
from services.trainer.world import settings
from services.trainer.world.channel import Channel, WorldFailure
from services.trainer.world.launch import launch_command, rank_arguments

FLAGS = ["--model", "org/name=/models/x", "--data-dir", "data", "--device", "cpu"]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINSMITH_REDIS_URL", "redis://127.0.0.1:1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_flags_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINSMITH_ZERO_STAGE", "3")
    monkeypatch.setenv("TINSMITH_PORT", "1234")
    settings = config.parse([*FLAGS, "--port", "99"])
    assert (settings.zero_stage, settings.port) == (3, 99)
    assert (settings.base_model, settings.model_path, settings.dtype) == ("org/name", "/models/x", "float32")


def test_a_model_that_is_not_there_is_named_before_anything_is_loaded() -> None:
    with pytest.raises(InvalidRequest, match="there is no /models/x: put the model's files into /models/x"):
        load(config.parse(FLAGS), config.Place(0, 1))


@pytest.mark.parametrize(
    "flags",
    [
        ["--model", "nopath"],
        ["--device", "tpu"],
        ["--zero-stage", "4"],
        ["--micro-batch-tokens", "0"],
        ["--micro-batch-tokens", "many"],
        ["--micro-batch-tokens", "3000000000"],
        ["--offload-optimizer", "nvme"],
        ["--max-full-models", "0"],
        ["--activation-checkpointing", "sometimes"],
        ["--zero-replica-ranks", "0", "--zero-stage", "3"],
        ["--zero-replica-ranks", "2", "--zero-stage", "2"],
        ["--zero-prefetch-elements", "many", "--zero-stage", "3"],
        ["--zero-prefetch-elements", "0"],
        ["--zero-quantized-base", "maybe", "--zero-stage", "3"],
        ["--zero-quantized-base", "yes"],
        ["--adapter-host-gib", "some"],
        ["--adapter-host-gib", "-1"],
        ["--adapter-host-gib", "nan"],
    ],
)
def test_senseless_flags_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        config.parse([*FLAGS, *flags])
    assert flags[0] in capsys.readouterr().err


def test_all_mistakes_are_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        config.parse(["--device", "cpu", "--memory-gib", "much", "--zero-quantized-base", "yes"])
    told = capsys.readouterr().err
    for mistaken in ("--model", "--data-dir", "--memory-gib", "--zero-quantized-base"):
        assert mistaken in told


@pytest.mark.parametrize(
    ("flags", "checkpoints", "keeps"),
    [
        (["--device", "cuda"], True, True),
        (["--device", "cpu"], False, False),
        (["--device", "cuda", "--activation-checkpointing", "off"], False, False),
        (["--device", "cuda", "--activation-checkpointing", "on"], True, False),
        (["--device", "cpu", "--activation-checkpointing", "on"], True, False),
    ],
)
def test_activations_are_checkpointed_on_gpus_as_far_as_memory_needs_unless_a_flag_says_otherwise(
    flags: list[str], checkpoints: bool, keeps: bool
) -> None:
    found = config.parse([*FLAGS, *flags])
    assert (found.activation_checkpointing, found.keeps_blocks) == (checkpoints, keeps)


def test_the_environment_is_checked_like_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINSMITH_DEVICE", "tpu")
    with pytest.raises(SystemExit):
        config.parse(["--model", "a=b", "--data-dir", "data"])


def test_how_zero_3_shares_weights_is_said_by_flags() -> None:
    assert config.parse([*FLAGS, "--zero-stage", "3"]).sharding == Sharding()
    flags = ["--zero-stage", "3", "--zero-replica-ranks", "2", "--zero-prefetch-elements", "0"]
    settings = config.parse([*FLAGS, *flags, "--zero-quantized-base", "yes"])
    assert settings.sharding == Sharding(2, 0, True)
    with pytest.raises(InvalidRequest, match="--zero-replica-ranks 2: a trainer of 3 ranks"):
        load(settings, config.Place(0, 3))


def test_redis_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TINSMITH_REDIS_URL")
    with pytest.raises(SystemExit):
        config.parse(FLAGS)


def test_a_micro_batch_on_a_cpu_is_small_unless_it_is_said_otherwise() -> None:
    assert config.parse([*FLAGS, "--device", "cpu"]).micro_batch_tokens == 1024
    assert config.parse([*FLAGS, "--device", "cuda"]).micro_batch_tokens == 8192
    assert config.parse([*FLAGS, "--micro-batch-tokens", "64"]).micro_batch_tokens == 64


def test_a_rank_without_a_gpu_of_its_own_says_how_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(InvalidRequest, match="2 ranks need as many GPUs, and 1 are visible here"):
        init_distributed("cuda")


def test_a_rank_computes_on_the_gpu_that_it_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Chosen(Exception):
        pass

    def choose(device: int) -> None:
        raise Chosen(device)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", choose)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(Chosen, match="2"):
        init_distributed("cuda")


def test_a_world_of_no_ranks_is_refused() -> None:
    done = subprocess.run(launch_command(0, []), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "--ranks must be above 0" in done.stderr


STARTS = """
import subprocess, sys, time
from services.trainer.world.launch import launch_command, rank_arguments
commands = {"alone": lambda: launch_command(1, sys.argv[2:])}
commands["agent"] = lambda: [sys.executable, *rank_arguments(sys.argv[2:])]
print(subprocess.Popen(commands[sys.argv[1]]()).pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("who", ["alone", "agent"])
def test_a_rank_ends_with_who_started_it_also_while_it_imports(tmp_path: Path, who: str) -> None:
    flags = ["--model", "a/b=/nowhere", "--data-dir", str(tmp_path)]
    # Where there is no Redis it would wait for one.
    environment = {**os.environ, "TINSMITH_REDIS_URL": f"redis://127.0.0.1:{free_port()}/0"}
    command = [sys.executable, "-c", STARTS, who, *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as starter:
        assert starter.stdout is not None
        rank = psutil.Process(int(starter.stdout.readline()))
        try:
            deadline = time.monotonic() + 60
            while "-u" not in rank.cmdline():
                assert time.monotonic() < deadline
                time.sleep(0.01)
            starter.kill()
            rank.wait(60)
        finally:
            starter.kill()
            if rank.is_running():
                rank.kill()


def test_a_rank_whose_agent_ended_before_it_began_is_killed() -> None:
    arguments = rank_arguments(["--help"])
    arguments[arguments.index(str(os.getpid()))] = str(os.getppid())
    done = subprocess.run([sys.executable, *arguments], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, b"")


class TwoRanks(Channel):
    """A rank whose peer came to the given outcome."""

    def __init__(self, theirs: str) -> None:
        super().__init__(1, timedelta(seconds=1))
        self._theirs = theirs

    def _exchange(self, outcome: str) -> list[str]:
        return [outcome, self._theirs]


def test_ranks_that_all_succeed_go_on() -> None:
    TwoRanks("").agree(None)


def test_an_error_all_ranks_share_is_the_commands() -> None:
    with pytest.raises(InvalidRequest, match="too high"):
        TwoRanks("InvalidRequest: rank too high").agree(InvalidRequest("rank too high"))
    with pytest.raises(Internal, match="out of memory"):
        TwoRanks("MemoryError: out of memory").agree(MemoryError("out of memory"))


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [(None, "RuntimeError: broken"), (InvalidRequest("no"), ""), (InvalidRequest("no"), "Internal: other")],
)
def test_a_world_whose_ranks_disagree_is_given_up(mine: TinsmithError | None, theirs: str) -> None:
    with pytest.raises(WorldFailure):
        TwoRanks(theirs).agree(mine)


def test_ranks_of_which_some_keep_activations_find_that_out_before_they_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = replace(config.parse(FLAGS), activation_checkpointing=True)
    ranks = [replace(one, keeps_blocks=keeps) for keeps in (False, True)]
    told: list[list[int]] = []

    def least(mine: Sequence[int], _device: str) -> list[int]:
        told.append(list(mine))
        return list(mine)

    monkeypatch.setattr(settings, "least", least)
    for rank in ranks:
        settings.check_same(rank)
    of_all = iter([[min(each) for each in zip(*told[first::2], strict=True)] for first in (0, 1)])
    monkeypatch.setattr(settings, "least", lambda *_: next(of_all))
    with pytest.raises(InvalidRequest, match="--activation-checkpointing auto: not the same on all ranks"):
        settings.check_same(ranks[0])
