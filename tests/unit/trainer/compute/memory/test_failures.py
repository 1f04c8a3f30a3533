"""What exceptions are taken for: a lack of memory, the device's end, or an operation's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from services.common.contract.errors import Internal, InvalidRequest
from services.common.process import failpoints
from services.trainer.compute.memory.failures import is_of_device, is_out_of_memory

ROOT = Path(__file__).parents[5]


def accelerator(number: int) -> torch.AcceleratorError:
    """As torch raises it: with CUDA's number."""
    error = torch.AcceleratorError(f"CUDA error: {number}")
    error.error_code = number
    return error


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        accelerator(2),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
        MemoryError("Unable to allocate 2.00 GiB for an array"),
    ],
    ids=lambda error: str(error)[:30],
)
def test_a_lack_of_memory_is_known_in_all_its_forms_and_is_not_the_device(error: Exception) -> None:
    assert is_out_of_memory(error) and not is_of_device(error)


@pytest.mark.parametrize("number", [214, 700, 710, 719])
def test_a_device_whose_memory_or_kernels_gave_out_is_in_doubt(number: int) -> None:
    assert is_of_device(accelerator(number)) and not is_out_of_memory(accelerator(number))


@pytest.mark.parametrize(
    "error",
    [
        accelerator(1),
        accelerator(701),
        KeyError("weights"),
        RuntimeError("shapes differ"),
        InvalidRequest("no"),
    ],
    ids=repr,
)
def test_what_was_asked_wrongly_is_of_the_operation_alone(error: Exception) -> None:
    assert not is_of_device(error) and not is_out_of_memory(error)


def test_what_another_call_is_told_of_a_kernel_that_broke_off_is_found_out_by_waiting_for_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited = []

    def synchronize() -> None:
        waited.append(True)
        raise accelerator(700)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    assert not is_of_device(Internal("said by the operation"))
    assert not is_of_device(torch.OutOfMemoryError("CUDA out of memory"))
    assert not waited, "the device goes on meanwhile"
    assert is_of_device(RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert not is_of_device(RuntimeError("shapes differ"))


@pytest.mark.parametrize(("action", "said"), [("oom", "True False"), ("device", "False True")])
def test_failpoints_of_a_trainer_raise_what_a_device_does(action: str, said: str) -> None:
    code = (
        "from services.common.process import failpoints\n"
        "from services.trainer.compute.memory.failures import is_of_device, is_out_of_memory\n"
        "try:\n    failpoints.hit('trainer.mid_batch')\n"
        "except Exception as error:\n    print(is_out_of_memory(error), is_of_device(error))"
    )
    environment = {failpoints.VARIABLE: f"trainer.mid_batch={action}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == said, done.stderr
