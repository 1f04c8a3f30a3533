"""What `tinsmith up` shows: who is still loading, warnings from the logs, and what to export.

On a terminal one line says what is being waited for; elsewhere only changes are printed.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
import time
from pathlib import Path

# Errors of any kind, but only our own warnings: the libraries warn about what is meant to be so.
_NOTEWORTHY = re.compile(r"\b(ERROR|CRITICAL|Traceback)\b|^\d\d:\d\d:\d\d WARNING|^[\w.]*Error\b")
_CLEAR = "\r\033[K"
_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


class Progress:
    """Prints to stdout. `verbose`: every line of every log."""

    def __init__(self, log_dir: Path, verbose: bool) -> None:
        self._log_dir = log_dir
        self._verbose = verbose
        self._offsets: dict[Path, int] = {}
        self._started = time.monotonic()
        self._tty = sys.stdout.isatty()
        self._spinner = itertools.cycle(_SPINNER)
        self._serving = False

    def note(self, text: str) -> None:
        """One line that stays."""
        self._write(f"{_CLEAR if self._tty else ''}{text}\n")

    def waiting(self, names: list[str]) -> None:
        """Shows who is still loading."""
        self.follow()
        if self._tty and names:
            seconds = time.monotonic() - self._started
            self._write(f"{_CLEAR}{next(self._spinner)} {seconds:3.0f} s  loading {', '.join(names)}")

    def ready(self, base_url: str, grpc_address: str, api_key: str) -> None:
        """Says how to use the cluster."""
        self._serving = True
        self.note(
            f"\nTinsmith is up (gRPC on {grpc_address}). In another terminal:\n\n"
            f"    export TINKER_BASE_URL={base_url}\n"
            f"    export TINKER_API_KEY={api_key}\n\n"
            "Ctrl-C stops it.\n"
        )

    def follow(self) -> None:
        """Prints what the logs have got since the last call: all of it when verbose, else what is
        noteworthy once the cluster serves."""
        for path in sorted(self._log_dir.glob("*.log")):
            for line in self._new_lines(path):
                if self._verbose or (self._serving and _NOTEWORTHY.search(line)):
                    self.note(f"{path.stem:>10} | {line}")

    def _new_lines(self, path: Path) -> list[str]:
        with path.open("rb") as file:
            file.seek(self._offsets.get(path, 0))
            data = file.read(1 << 20)
        # A line is printed once it is whole.
        data = data[: data.rfind(b"\n") + 1]
        self._offsets[path] = self._offsets.get(path, 0) + len(data)
        return data.decode(errors="replace").splitlines()

    def _write(self, text: str) -> None:
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except OSError:
            # The terminal was closed; the cluster must still be stopped in order.
            sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
            self._tty = False
