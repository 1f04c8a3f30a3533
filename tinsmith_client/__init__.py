"""The Python client of Tinsmith's gRPC service, for programs that do without the tinker SDK, torch and numpy.

Invariant: every request may be lost on its way, and takes effect once all the same: it is sent again with the
number that it had.

    client = Client("127.0.0.1:8001", api_key)
    with client.create_session() as session:
        model = session.create_model("org/name", rank=8)
        work = model.forward_backward([datum(tokens[:-1], tokens[1:], weights=[1.0] * (len(tokens) - 1))])
        model.optim_step(learning_rate=1e-4).result()
        print(work.result().metrics["loss:sum"])
"""

from tinsmith_client.client import Client
from tinsmith_client.errors import CallFailed, Changed, Refused, RequestFailed, TinsmithError, Unreachable
from tinsmith_client.results import Pending, as_completed
from tinsmith_client.sampling import OnUpdate, PendingSample, Sampler, Span, Stream, versions
from tinsmith_client.sessions import Session
from tinsmith_client.tensors import datum, floats, ints
from tinsmith_client.training import Model

__all__ = [
    "CallFailed",
    "Changed",
    "Client",
    "Model",
    "OnUpdate",
    "Pending",
    "PendingSample",
    "Refused",
    "RequestFailed",
    "Sampler",
    "Session",
    "Span",
    "Stream",
    "TinsmithError",
    "Unreachable",
    "as_completed",
    "datum",
    "floats",
    "ints",
    "versions",
]
