"""The words of redis-cli that the scripts use, where the program is not at hand: on a real server.

REDIS_PORT is the port without `-p`.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
from io import BufferedRWPair
from pathlib import Path


def main(words: list[str]) -> int:
    port = os.environ["REDIS_PORT"]
    if words[0] == "-p":
        port, words = words[1], words[2:]
    try:
        with socket.create_connection(("127.0.0.1", int(port)), timeout=60) as connection:
            stream = connection.makefile("rwb")
            if password := os.environ.get("REDISCLI_AUTH"):
                ask(stream, "auth", password)
            if words[0] == "--rdb":
                ask(stream, "save")
                _, folder, _, name = [
                    *ask(stream, "config", "get", "dir"),
                    *ask(stream, "config", "get", "dbfilename"),
                ]
                shutil.copy(Path(folder, name), words[1])
            else:
                print(*ask(stream, *words), sep="\n")
    except (OSError, EOFError):
        return int(words[0] != "shutdown")
    return 0


def ask(stream: BufferedRWPair, *words: str) -> list[str]:
    """The reply to a command, as the lines that redis-cli would print."""
    parts = [f"${len(word.encode())}\r\n{word}\r\n" for word in words]
    stream.write(f"*{len(words)}\r\n{''.join(parts)}".encode())
    stream.flush()
    return reply(stream)


def reply(stream: BufferedRWPair) -> list[str]:
    line = stream.readline().decode().rstrip()
    if not line:
        raise EOFError
    kind, rest = line[0], line[1:]
    if kind == "*":
        return [one for _ in range(int(rest)) for one in reply(stream)]
    if kind == "$":
        return [stream.read(int(rest) + 2)[:-2].decode()]
    return [rest]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
