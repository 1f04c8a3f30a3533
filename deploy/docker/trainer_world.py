"""Entry point of the trainer image: a world of RANKS processes in this container.

    python trainer_world.py --ranks 2 -- --id trainer-0 --model NAME=PATH ...

What follows `--` goes to every rank (`python -m services.trainer --help`).
"""

from __future__ import annotations

import argparse
import os

from services.trainer.world.launch import launch_command

# Only ever bound on the container's loopback, where nothing else listens.
MASTER_PORT = 29500


def world_command(argv: list[str] | None = None) -> list[str]:
    """The launcher's command line for this one's."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, required=True, help="processes, one per GPU of the container")
    parser.add_argument("args", nargs="*", help="arguments of every rank")
    options = parser.parse_args(argv)
    if options.ranks < 1:
        parser.error("--ranks must be at least 1")
    return launch_command(options.ranks, MASTER_PORT, options.args)


if __name__ == "__main__":
    command = world_command()
    # The launcher takes this process's place, so that it gets the container's signals.
    os.execv(command[0], command)
