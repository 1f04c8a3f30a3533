"""What is wrong with options is told before anything starts."""

from __future__ import annotations

from pathlib import Path

from tests.unit.launcher.test_plan import mistakes, options


def test_experts_are_told_in_one_stage_and_on_gpus_by_the_v2_model_runner(tmp_path: Path) -> None:
    gpus = {"device": "cuda", "gpus": ("0", "1"), "routed_experts": "yes"}
    assert mistakes(options(tmp_path, routed_experts="yes")) == []
    assert mistakes(options(tmp_path, routed_experts="yes", model_runner="v1")) == []
    assert mistakes(options(tmp_path, **gpus)) == mistakes(options(tmp_path, **gpus, model_runner="v2")) == []
    assert mistakes(options(tmp_path, **gpus, sampler_pp=2)) == [
        "--routed-experts does not go with --sampler-pp: leave one of them out"
    ]
    assert mistakes(options(tmp_path, **gpus, model_runner="v1")) == [
        "--routed-experts on GPUs needs --model-runner v2: leave one of them out"
    ]


def test_what_is_of_samplers_alone_is_refused_where_there_are_none(tmp_path: Path) -> None:
    found = mistakes(
        options(tmp_path, samplers=0, max_sequences=8, enforce_eager="yes", speculative_ngram_tokens=2)
    )
    assert found == [
        f"{flag} is for samplers, and --samplers is 0: leave it out"
        for flag in ("--max-sequences", "--speculative-ngram-tokens", "--enforce-eager")
    ]
    assert mistakes(options(tmp_path, samplers=0)) == []
