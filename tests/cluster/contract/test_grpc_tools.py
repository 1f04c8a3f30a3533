"""A client that has never seen this repository: `buf curl`, by server reflection alone."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any

from tests.cluster.conftest import BASE_MODEL, Cluster


def curl(cluster: Cluster, method: str, request: dict[str, Any]) -> dict[str, Any]:
    """The answer of a method, as JSON."""
    url = f"http://127.0.0.1:{cluster.grpc_port}/tinsmith.v1.TinsmithService/{method}"
    buf = str(Path(sys.executable).with_name("buf"))
    command = [buf, "curl", "--protocol", "grpc", "--http2-prior-knowledge", "--data", "@-"]
    command += ["--reflect-header", "*", "--header", f"x-api-key: {cluster.api_key}", url]
    done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_another_languages_client_trains_by_reflection(cluster: Cluster) -> None:
    (model,) = curl(cluster, "ListModels", {})["models"]
    assert (model["name"], model["trainable"]) == (BASE_MODEL, True)
    session = curl(cluster, "CreateSession", {"idempotencyKey": "by-curl"})["sessionId"]
    assert curl(cluster, "CreateSession", {"idempotencyKey": "by-curl"})["sessionId"] == session
    lora = {"rank": 4, "seed": "1", "trainAttn": True, "trainMlp": True, "trainUnembed": True}
    made = curl(cluster, "CreateModel", {"sessionId": session, "baseModel": BASE_MODEL, "lora": lora})
    tokens = base64.b64encode(array("i", [1, 2, 3]).tobytes()).decode()
    targets = base64.b64encode(array("q", [2, 3, 4]).tobytes()).decode()
    weights = base64.b64encode(array("f", [1, 1, 1]).tobytes()).decode()
    datum = {
        "tokens": {"dtype": "DATA_TYPE_INT32", "shape": ["3"], "data": tokens},
        "lossInputs": {
            "target_tokens": {"dtype": "DATA_TYPE_INT64", "shape": ["3"], "data": targets},
            "weights": {"dtype": "DATA_TYPE_FLOAT32", "shape": ["3"], "data": weights},
        },
    }
    batch = {"data": [datum], "lossFn": "cross_entropy"}
    request = {"modelId": made["modelId"], "seqId": "1", "forwardBackward": batch}
    sent = curl(cluster, "ForwardBackward", request)
    asked, answer = {"requestId": sent["requestId"], "timeoutSeconds": 30}, dict[str, Any]()
    while "result" not in answer:
        answer = curl(cluster, "GetResult", asked)
    result = answer["result"]["forwardBackward"]
    # Three tokens, near the loss of a uniform guess over 512.
    assert 12 < result["metrics"]["loss:sum"] < 25
    assert len(base64.b64decode(result["outputs"]["logprobs"]["data"])) == 3 * 4
    curl(cluster, "FinishSession", {"sessionId": session})
