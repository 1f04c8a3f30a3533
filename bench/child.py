"""A yardstick in a process of its own, which answers lines of JSON on stdin with lines of JSON on stdout."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


class Child:
    """`python -m MODULE ARGUMENTS`, until it is closed."""

    def __init__(self, module: str, arguments: list[str], environment: Mapping[str, str], log: Path) -> None:
        """Starts it; the first `ask` waits until it has loaded what it needs.

        Args:
            environment: set beside this process's own.
            log: file for its stderr.
        """
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={**os.environ, **environment},
            )
        self._module, self._log = module, log

    def ask(self, job: Mapping[str, Any]) -> Any:
        """The answer to a job.

        Raises:
            RuntimeError: the child ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(job), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{self._module} ended:\n{self._log.read_text(errors='replace')[-4000:]}")
        return json.loads(answer)

    def close(self) -> None:
        """Ends it, which takes it at most 30 seconds."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def answer_jobs(load: Callable[[], Callable[[Any], Any]]) -> None:
    """What a child runs until stdin ends.

    Args:
        load: gives the function that answers one job. What it prints goes to stderr.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answer = load()
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)
