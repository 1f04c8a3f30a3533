"""Where the interpreter runs."""

from __future__ import annotations

from typing import Any

import torch

# Under other names: Triton takes the one class here that is concrete.
from triton.backends.compiler import GPUTarget as _Target
from triton.backends.driver import DriverBase as _DriverBase


class InterpreterDriver(_DriverBase):
    """The CPU."""

    @classmethod
    def is_active(cls) -> bool:
        """Always: it is only there where the interpreter is wanted."""
        return True

    def get_current_target(self) -> Any:
        """Not a GPU."""
        return _Target("cpu", 0, 1)

    def get_active_torch_device(self) -> torch.device:
        """Of the tensors."""
        return torch.device("cpu")

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Of a compiled kernel's arguments."""
        raise NotImplementedError("kernels are interpreted here: set TRITON_INTERPRET=1")

    def get_benchmarker(self) -> Any:
        """Of a compiled kernel."""
        raise NotImplementedError("kernels are interpreted here: set TRITON_INTERPRET=1")
