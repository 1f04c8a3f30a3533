"""One log format for every process."""

from __future__ import annotations

import logging
import os


def configure(name: str) -> None:
    """Logs to stderr as "time level [name] module: message"; TINSMITH_LOG_LEVEL sets the level."""
    logging.basicConfig(
        level=os.environ.get("TINSMITH_LOG_LEVEL", "INFO").upper(),
        format=f"%(asctime)s %(levelname)-7s [{name}] %(name)s: %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
