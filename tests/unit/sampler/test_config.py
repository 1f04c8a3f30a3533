"""The sampler's command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.common.contract.errors import InvalidRequest
from services.sampler import config

ARGUMENTS = ["--id", "sampler-0", "--model", "org/name=/models/m", "--data-dir", "/data"]


@pytest.fixture(autouse=True)
def redis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINSMITH_REDIS_URL", "redis://:secret@host/0")


def test_flags_become_settings() -> None:
    settings = config.parse([*ARGUMENTS, "--max-loras", "3"])
    assert (settings.base_model, settings.model_path, settings.max_loras) == ("org/name", "/models/m", 3)
    assert settings.data_dir == Path("/data")
    assert settings.redis_url == "redis://:secret@host/0"


def test_an_environment_variable_stands_in_for_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINSMITH_MAX_LORA_RANK", "16")
    assert config.parse(ARGUMENTS).max_lora_rank == 16
    assert config.parse([*ARGUMENTS, "--max-lora-rank", "32"]).max_lora_rank == 32


@pytest.mark.parametrize(
    "wrong",
    [
        ["--model", "no-path"],
        ["--max-lora-rank", "7"],
        ["--stall-seconds", "0"],
        ["--max-context", "1"],
        ["--max-loras", "-1"],
        ["--max-batched-tokens", "-1"],
        ["--max-batched-tokens", "100", "--max-sequences", "101"],
        ["--speculative-ngram-tokens", "-1"],
        ["--speculative-ngram-tokens", "129"],
        ["--kv-cache-dtype", "fp8", "--device", "cpu"],
        ["--quantization", "fp8_per_tensor", "--device", "cpu"],
        ["--quantization", "fp8_per_tensor", "--dtype", "float32"],
        ["--dtype", "float32", "--device", "cuda"],
        ["--pipeline-parallel-size", "0"],
        ["--speculative-ngram-tokens", "2", "--pipeline-parallel-size", "2"],
        ["--routed-experts", "yes", "--pipeline-parallel-size", "2"],
        ["--routed-experts", "yes", "--model-runner", "v1", "--device", "cuda"],
        ["--max-sequences", "-1"],
        ["--snapshot-cache-gib", "-1"],
        ["--gpu-memory-utilization", "1.5"],
        ["--drain-seconds", "nan"],
    ],
    ids=" ".join,
)
def test_a_wrong_value_is_refused_with_what_to_use(wrong: list[str]) -> None:
    with pytest.raises(InvalidRequest, match=wrong[0]):
        config.parse([*ARGUMENTS, *wrong])


def test_what_a_device_cannot_do_is_refused_when_the_device_is_known() -> None:
    for words in (("--kv-cache-dtype", "fp8"), ("--quantization", "fp8_per_block")):
        settings = config.parse([*ARGUMENTS, *words])
        config.check_device(settings, "cuda")
        with pytest.raises(InvalidRequest, match=f"{' '.join(words)} is for CUDA"):
            config.check_device(settings, "cpu")


@pytest.mark.parametrize(
    ("variable", "word", "refusal"),
    [
        ("HEAD_DTYPE", "bfloat16", "--head-dtype must be one of auto, float32, not 'bfloat16'"),
        ("DTYPE", "float16", "--dtype must be one of auto, float32, bfloat16, not 'float16'"),
        ("DEVICE", "gpu", "--device must be one of auto, cpu, cuda, not 'gpu'"),
    ],
)
def test_a_wrong_word_of_the_environment_is_refused_like_a_flags(
    monkeypatch: pytest.MonkeyPatch, variable: str, word: str, refusal: str
) -> None:
    monkeypatch.setenv(f"TINSMITH_{variable}", word)
    with pytest.raises(InvalidRequest, match=refusal):
        config.parse(ARGUMENTS)


def test_all_mistakes_are_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TINSMITH_REDIS_URL")
    with pytest.raises(InvalidRequest) as refused:
        config.parse(["--model", "no-path", "--port", "70000", "--kv-cache-gib", "nan", "--colour", "red"])
    wrong = (
        "'--colour'",
        "'red'",
        "--id",
        "--port",
        "--model",
        "--data-dir",
        "--kv-cache-gib",
        "set TINSMITH_R",
    )
    told = refused.value.message.split("\n  ")
    assert [line.startswith(start) for line, start in zip(told, wrong, strict=True)] == [True] * 8, told


def test_without_redis_it_says_which_variable_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TINSMITH_REDIS_URL")
    with pytest.raises(InvalidRequest, match="TINSMITH_REDIS_URL"):
        config.parse(ARGUMENTS)


def test_secrets_reach_the_engine_by_environment() -> None:
    environment = config.engine_environment(config.parse(ARGUMENTS))
    assert environment["TINSMITH_REDIS_URL"] == "redis://:secret@host/0"
    assert environment["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"


def test_adapters_on_cuda_are_not_computed_in_float32() -> None:
    exact = config.parse([*ARGUMENTS, "--dtype", "float32"])
    with pytest.raises(InvalidRequest, match=r"--dtype says float32: leave it out .* or give --max-loras 0"):
        config.check_device(exact, "cuda")
    config.check_device(exact, "cpu")
    config.check_device(config.parse(ARGUMENTS), "cuda")
    config.check_device(config.parse([*ARGUMENTS, "--dtype", "float32", "--max-loras", "0"]), "cuda")


@pytest.mark.parametrize("variable", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_threads_hardly_spin_at_barriers_unless_the_environment_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.delenv(variable, raising=False)
    settings = config.parse(ARGUMENTS)
    assert config.engine_environment(settings)[variable] in ("passive", "2000")
    monkeypatch.setenv(variable, "7")
    assert config.engine_environment(settings)[variable] == "7"


def test_stages_times_their_workers_are_the_workers_of_a_replica() -> None:
    assert config.parse(ARGUMENTS).workers == 1
    words = ["--tensor-parallel-size", "2", "--pipeline-parallel-size", "3"]
    settings = config.parse([*ARGUMENTS, *words])
    assert settings.workers == 6
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CPU_OMP_THREADS_BIND"):
        alone = config.engine_environment(config.parse(ARGUMENTS))
        staged = config.engine_environment(config.parse([*ARGUMENTS, "--pipeline-parallel-size", "2"]))
        assert (name in alone) != (name in staged)


def runner_of(device: str, *flags: str, triton: bool = True) -> str | None:
    """vLLM's switch of its V2 model runner; None = vLLM chooses."""
    settings = config.parse([*ARGUMENTS, *flags])
    return config.device_environment(settings, device, triton=triton, compiles=False).get(
        "VLLM_USE_V2_MODEL_RUNNER"
    )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_model_runner_that_is_asked_for_is_taken_on_any_device(device: str) -> None:
    assert runner_of(device, "--model-runner", "v1", triton=False) == "0"
    assert runner_of(device, "--model-runner", "v2", "--speculative-ngram-tokens", "2") == "1"


def test_left_to_itself_a_cpu_and_what_drafts_has_the_v1_model_runner_and_the_rest_what_vllm_takes() -> None:
    assert runner_of("cpu") == "0"
    assert runner_of("cuda", "--speculative-ngram-tokens", "2") == "0"
    assert runner_of("cuda") is None


def test_experts_are_noted_by_the_v2_model_runner_but_on_a_cpu_where_v1_tells_them_too() -> None:
    telling = ("--routed-experts", "yes")
    assert runner_of("cuda", *telling) == "1"
    assert runner_of("cuda", *telling, "--speculative-ngram-tokens", "2") == "1"
    assert runner_of("cpu", *telling, triton=False) == "0"
    assert runner_of("cpu", *telling, "--model-runner", "v2") == "1"
    with pytest.raises(InvalidRequest, match="--routed-experts needs Triton, and vLLM has none on this cuda"):
        runner_of("cuda", *telling, triton=False)
    v1 = config.parse([*ARGUMENTS, *telling, "--model-runner", "v1"])
    config.check_device(v1, "cpu")
    with pytest.raises(
        InvalidRequest, match=r"--routed-experts on CUDA needs vLLM's V2 .* leave one of them out"
    ):
        config.check_device(v1, "cuda")


def test_a_model_runner_without_its_kernels_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="--model-runner v2 needs Triton"):
        runner_of("cpu", "--model-runner", "v2", triton=False)


def test_on_cuda_what_a_toolkit_would_have_to_compile_is_not_used_unless_the_environment_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    variable = "VLLM_USE_FLASHINFER_SAMPLER"
    settings = config.parse(ARGUMENTS)
    monkeypatch.delenv(variable, raising=False)
    assert config.device_environment(settings, "cuda", triton=True, compiles=True)[variable] == "0"
    monkeypatch.setenv(variable, "1")
    assert config.device_environment(settings, "cuda", triton=True, compiles=True)[variable] == "1"
