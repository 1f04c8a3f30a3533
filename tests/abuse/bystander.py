"""Somebody else, who only wants to live: sends a heartbeat again and again and notes how long it takes.

    python -m tests.abuse.bystander BASE_URL API_KEY SESSION_ID

Runs as a process of its own, so that the attacker's own work is not what it measures. Ends when its standard
input does, and prints {"seconds": [...], "errors": [...]} as JSON.
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
import time
from urllib.parse import urlsplit

_PAUSE_S = 0.05
_TIMEOUT_S = 120.0


def main(base_url: str, key: str, session_id: str) -> None:
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    where = urlsplit(base_url)
    body = json.dumps({"session_id": session_id})
    headers = {"x-api-key": key, "content-type": "application/json"}
    seconds, errors = [], []
    connection = http.client.HTTPConnection(str(where.hostname), where.port, timeout=_TIMEOUT_S)
    while not over.wait(_PAUSE_S):
        started = time.monotonic()
        try:
            connection.request("POST", "/api/v1/session_heartbeat", body, headers)
            answer = connection.getresponse()
            said = answer.read()
            if answer.status != 200:
                errors.append(f"{answer.status} {said[:200]!r}")
        except (OSError, http.client.HTTPException) as error:
            # An idle connection may be closed at any time; the next request opens another.
            connection.close()
            if not isinstance(error, http.client.RemoteDisconnected):
                errors.append(repr(error))
        seconds.append(time.monotonic() - started)
    print(json.dumps({"seconds": seconds, "errors": errors}))


if __name__ == "__main__":
    main(*sys.argv[1:])
