"""HTTP: the tokenizers of served base models, for clients on other machines."""

from __future__ import annotations

import io
from contextlib import ExitStack

import msgspec
from starlette.responses import Response

from services.common.process.pools import COMPUTE
from services.gateway.checkpoints.downloads import Download
from services.gateway.edge.http.checkpoints import Sending
from services.gateway.edge.http.codec.results_out import JSON
from services.gateway.edge.http.routes import Call


async def get_tokenizer(call: Call) -> Response:
    """{"files": {name: content}}: as `AutoTokenizer.from_pretrained` loads them from a directory."""
    call.check_query()
    with ExitStack() as counted:
        # Until it is sent: a tokenizer is tens of megabytes.
        counted.enter_context(call.app.gate.download(call.owner))
        account = counted.enter_context(call.budget.account(call.owner))
        files = await call.app.tokenizer_files.of(call.request.path_params["base_model"])
        account.hold(sum(len(content) for content in files.values()))
        body = await COMPUTE.run(msgspec.json.encode, {"files": files})
        found = Download(len(body), io.BytesIO(body), counted.pop_all())
    return Sending(found, {"content-length": str(len(body))}, JSON)
