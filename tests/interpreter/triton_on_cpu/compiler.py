"""What compiles nothing."""

from __future__ import annotations

from typing import Any, NoReturn

from triton.backends.compiler import BaseBackend as _BaseBackend


class InterpreterBackend(_BaseBackend):
    """Refuses to compile."""

    @staticmethod
    def supports_target(target: Any) -> bool:
        """Whether it is the CPU."""
        return bool(target.backend == "cpu")

    def hash(self) -> str:
        """Of what it compiles."""
        return "nothing"

    def parse_options(self, options: Any) -> NoReturn:
        """Of a kernel."""
        raise NotImplementedError("kernels are interpreted here: set TRITON_INTERPRET=1")

    def add_stages(self, stages: Any, options: Any, language: Any) -> NoReturn:
        """Of the compiler."""
        raise NotImplementedError("kernels are interpreted here: set TRITON_INTERPRET=1")

    def load_dialects(self, context: Any) -> NoReturn:
        """Of the compiler."""
        raise NotImplementedError("kernels are interpreted here: set TRITON_INTERPRET=1")

    def get_module_map(self) -> NoReturn:
        """Of the compiler."""
        raise NotImplementedError("kernels are interpreted here: set TRITON_INTERPRET=1")
