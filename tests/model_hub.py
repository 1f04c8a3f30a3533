"""A model hub of one model: what huggingface_hub asks of one, over HTTP on loopback."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

COMMIT = "1" * 40


class Hub:
    """Serves the files of a directory as a model.

    Attributes:
        status: with which it answers everything; 0: it serves.
        error_code: that it names in the headers then, as the hub does for models that need a login.
        failures: answers with `status` before it serves again; -1: all.
        asked: paths that it was asked for.
    """

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self.status = 0
        self.error_code = ""
        self.failures = -1
        self.asked: list[str] = []
        self._directory = directory

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body."""
        self.asked.append(path)
        if self.status and self.failures:
            self.failures -= 1
            return self.status, {"X-Error-Code": self.error_code} if self.error_code else {}, b"{}"
        path = path.partition("?")[0]
        files = {each.name: each.read_bytes() for each in self._directory.iterdir()}
        if path == f"/api/models/{self.name}/revision/main":
            siblings = [{"rfilename": name} for name in files]
            return 200, {}, json.dumps({"id": self.name, "sha": COMMIT, "siblings": siblings}).encode()
        if path == f"/api/models/{self.name}/tree/{COMMIT}":
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in files.items()
            ]
            return 200, {}, json.dumps(tree).encode()
        name = path.removeprefix(f"/{self.name}/resolve/{COMMIT}/")
        if name not in files:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        tag = hashlib.sha1(files[name]).hexdigest()
        return 200, {"X-Repo-Commit": COMMIT, "ETag": f'"{tag}"'}, files[name]


@contextmanager
def served(hub: Hub, port: int = 0) -> Iterator[str]:
    """Its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, body = hub.answer(self.path)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
