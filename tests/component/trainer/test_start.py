"""A trainer that refuses what it is to serve, as a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from services.common.process.process import REFUSED
from services.trainer.world.launch import launch_command
from tests.component.trainer.world import make_model


def last_words(redis_url: str, data_dir: Path, model: Path, *more: str, ranks: int = 1) -> str:
    """What a trainer writes that is not to be started again."""
    flags = ["--model", f"org/name={model}", "--data-dir", str(data_dir), "--port", "0", "--device", "cpu"]
    ended = subprocess.run(
        launch_command(ranks, ["--id", "trainer-0", *flags, *more]),
        # It may be started within another world.
        env={**os.environ, "TINSMITH_REDIS_URL": redis_url, "LOCAL_WORLD_SIZE": "3", "GROUP_RANK": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == REFUSED, ended.stderr
    return ended.stderr


def test_a_model_that_is_not_there_is_named(redis_url: str, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    said = last_words(redis_url, tmp_path, missing)
    assert f"there is no {missing}: put the model's files into {missing}" in said


@pytest.mark.heavy
def test_what_several_ranks_refuse_is_the_last_that_their_agent_says(redis_url: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / "tiny")
    said = last_words(redis_url, tmp_path, model, "--adapter-host-gib", "1000000", ranks=2)
    last = said.splitlines()[-1]
    assert "CRITICAL [node-0]" in last and last.endswith("for 2 ranks; give less")
    assert ": --adapter-host-gib 1e+06 is more than this machine has" in last


@pytest.mark.heavy
def test_ranks_that_do_not_take_their_flags_end_their_agent_with_their_status() -> None:
    flags = ["--model", "a/b=/nowhere", "--data-dir", "data", "--device", "tpu"]
    ended = subprocess.run(
        launch_command(2, flags),
        env={**os.environ, "TINSMITH_LOG_FORMAT": "json"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 2
    assert "--device must be one of auto, cpu, cuda, not 'tpu'" in ended.stderr
    said = [json.loads(line) for line in ended.stderr.splitlines() if line.startswith("{")]
    assert {each["process"] for each in said if each["message"].endswith("ended with status 2")} == {"node-0"}


ASKS_NOBODY = """
import socket, sys
def asked(*_): raise AssertionError("a name server was asked")
socket.getfqdn = asked
from services.trainer.world import node
sys.exit(node.main(["--ranks", "2", "--", "--help"]))
"""


@pytest.mark.heavy
def test_an_agent_asks_no_name_server_what_its_machine_is_called() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", ASKS_NOBODY], capture_output=True, text=True, timeout=240, check=False
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.heavy
def test_a_context_that_the_model_does_not_take_is_named(redis_url: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "qwen3",
        num_hidden_layers=1,
        hidden_size=32,
        intermediate_size=32,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=32,
        vocab_size=64,
        max_position_embeddings=128,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    said = last_words(redis_url, tmp_path, tmp_path / "model", "--max-context", "129")
    assert "--max-context is 129, and the model takes 128 tokens: give no more" in said
