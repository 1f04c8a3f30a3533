"""A sampler that starts, as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig

from services.common.process.process import REFUSED
from tests.component.loading import Scraped
from tests.component.sampler.process import launch, make_model, wait_ready


def last_words(redis_url: str, data_dir: Path, model: Path) -> str:
    """The last line of a sampler's log that ends before its engine starts."""
    flags = ["--model", f"org/name={model}", "--data-dir", str(data_dir), "--port", "0"]
    ended = subprocess.run(
        [sys.executable, "-m", "services.sampler", "--id", "sampler-0", *flags],
        env={**os.environ, "TINSMITH_REDIS_URL": redis_url},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == REFUSED
    assert "EngineCore" not in ended.stderr
    return ended.stderr.splitlines()[-1]


def test_a_model_that_is_not_there_is_named_before_the_engine_starts(redis_url: str, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    said = last_words(redis_url, tmp_path, missing)
    assert f"there is no {missing}: put the model's files into {missing}" in said


def test_a_model_that_vllm_computes_otherwise_is_named_before_the_engine_starts(
    redis_url: str, tmp_path: Path
) -> None:
    windows = {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 1}
    AutoConfig.for_model("qwen3", num_hidden_layers=2, **windows).save_pretrained(tmp_path / "model")
    said = last_words(redis_url, tmp_path, tmp_path / "model")
    assert "org/name has a window in some of its layers, and vLLM has one for all or none" in said


def test_what_vllm_has_against_a_model_is_the_last_word(redis_url: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model("qwen3", num_hidden_layers=2, architectures=["UnheardOfForCausalLM"])
    config.save_pretrained(tmp_path / "model")
    said = last_words(redis_url, tmp_path, tmp_path / "model")
    assert "vLLM does not take org/name with these settings" in said
    assert "UnheardOfForCausalLM" in said


@pytest.mark.heavy
def test_metrics_are_served_while_it_loads(redis_url: str, tmp_path: Path) -> None:
    sampler = launch(tmp_path, make_model(tmp_path / "model", tied=True), redis_url)
    try:
        with Scraped(sampler.metrics_port) as scraped:
            wait_ready(sampler)
        assert (scraped.loaded[0], scraped.loaded[-1]) == (0, 1)
    finally:
        assert sampler.stop() == 0
