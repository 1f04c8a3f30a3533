"""Keeps what libraries write to stderr out of the terminal."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def quiet(log: Path) -> Iterator[None]:
    """Within it everything that goes to stderr, also from compiled code and child processes, goes to `log`.

    What ends it as an error is shown on the terminal, as it would be without.
    """
    # Clusters keep keys in there, and warn of a directory that others come to: also a later one in `data`.
    for directory in reversed((log.parent, *log.parent.parents)):
        directory.mkdir(mode=0o700, exist_ok=True)
    terminal = os.dup(sys.stderr.fileno())
    logging.captureWarnings(True)
    with log.open("w") as file:
        logging.basicConfig(stream=file, level=logging.WARNING, force=True)
        sys.stderr.flush()
        os.dup2(file.fileno(), sys.stderr.fileno())
        try:
            yield
        except Exception:
            with os.fdopen(os.dup(terminal), "w") as shown:
                traceback.print_exc(file=shown)
            raise SystemExit(1) from None
        finally:
            sys.stderr.flush()
            os.dup2(terminal, sys.stderr.fileno())
            os.close(terminal)
            logging.captureWarnings(False)
