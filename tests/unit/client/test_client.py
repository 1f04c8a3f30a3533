"""The Python client: what it needs, what it says of refusals, and how it numbers what it sends."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from concurrent import futures
from pathlib import Path
from typing import Any, TypeVar

import grpc
import pytest

from tests.unit.gateway.edges import ALICE, BASE, LORA, Edges, running
from tinsmith.v1 import models_pb2, sampling_pb2, service_pb2_grpc, training_pb2
from tinsmith_client import (
    Changed,
    Client,
    Model,
    Refused,
    RequestFailed,
    Session,
    Unreachable,
    datum,
    floats,
    ints,
)
from tinsmith_client.calls import Calls
from tinsmith_client.sampling import Sampler, _fresh
from tinsmith_client.tensors import tensor

T = TypeVar("T")


@pytest.fixture
async def edges(redis_url: str, tmp_path: Path) -> AsyncIterator[Edges]:
    async with running(redis_url, tmp_path) as found:
        yield found


async def waiting(function: Callable[..., T], *args: Any, **named: Any) -> T:
    """What a function of the client, which blocks, comes to while the gateway runs here."""
    return await asyncio.to_thread(function, *args, **named)


async def model_of(edges: Edges, client: Client) -> tuple[Session, Model]:
    session = await waiting(client.create_session)
    creating = asyncio.create_task(waiting(session.create_model, BASE, rank=4))
    model_id = f"{session.session_id}:train:0"
    async with asyncio.timeout(20):
        while await edges.app.models._models.get(model_id) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        while await edges.operation(model_id, 0) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    await edges.answer(model_id, 0, create_model=models_pb2.CreateModelResult(lora=LORA))
    return session, await creating


def test_it_needs_neither_torch_nor_numpy_nor_the_services() -> None:
    program = (
        "import sys, tinsmith_client; loaded = {name.split('.')[0] for name in sys.modules}; "
        "print(sorted(loaded & {'torch', 'numpy', 'services', 'tinker', 'vllm'}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_numbers_become_tensors_and_come_back() -> None:
    made = datum([1, 2], [2, 300], weights=[0.5, 1.0])
    assert ints(made.tokens.data) == [1, 2]
    assert list(made.loss_inputs["target_tokens"].shape) == [2]
    assert made.loss_inputs["target_tokens"].data == (2).to_bytes(8, "little") + (300).to_bytes(8, "little")
    assert floats(made.loss_inputs["weights"].data) == [0.5, 1.0]
    with pytest.raises(OverflowError):
        tensor("i", [2**31])


def test_a_stream_that_is_told_again_goes_on_after_what_was_told_or_fails() -> None:
    assert _fresh([], [1, 2], 0) == [1, 2]
    assert _fresh([1, 2], [3], 2) == [3]
    assert _fresh([1, 2], [1, 2, 3], 0) == [3]
    assert _fresh([1, 2, 3], [1, 2], 0) == []
    assert _fresh([1, 2, 3], [3, 4], 2) == [4]
    for told, tokens, start in (([1, 2], [1, 3, 4], 0), ([1, 2, 3], [9], 1), ([1], [2], 0)):
        with pytest.raises(Changed):
            _fresh(told, tokens, start)


class _Lost(service_pb2_grpc.TinsmithServiceServicer):
    """A service whose samplers do not go on with the same tokens."""

    def StreamSample(self, request: Any, context: Any) -> Any:
        yield sampling_pb2.StreamSampleResponse(request_id="r")
        context.abort(grpc.StatusCode.DATA_LOSS, "send this as a new sample")


def test_a_stream_that_the_service_cannot_go_on_with_has_changed() -> None:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    service_pb2_grpc.add_TinsmithServiceServicer_to_server(_Lost(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    calls = Calls(f"127.0.0.1:{port}", ALICE, 5, None)
    try:
        with pytest.raises(Changed, match="new sample"):
            list(Sampler(calls, "s:sample:0").stream([1]))
    finally:
        calls.close()
        server.stop(None)


async def test_a_refusal_says_what_to_change_and_is_not_repeated(edges: Edges) -> None:
    with Client(edges.grpc_address, ALICE) as client:
        session = await waiting(client.create_session)
        with pytest.raises(Refused) as caught:
            await waiting(session.create_model, "other")
        error = caught.value
        assert (error.status, error.reason) == ("INVALID_ARGUMENT", "UNKNOWN_BASE_MODEL")
        assert list(error.fields) == ["base_model"]
        session.leave()
    with Client(edges.grpc_address, "tml-wrong") as stranger, pytest.raises(Refused, match="UNAUTHENTICATED"):
        await waiting(stranger.server_info)


def test_a_service_that_is_away_is_asked_for_as_long_as_the_client_is_patient() -> None:
    with (
        Client("127.0.0.1:1", ALICE, patience=0.5) as client,
        pytest.raises(Unreachable, match="UNAVAILABLE"),
    ):
        client.server_info()


async def test_operations_are_numbered_and_a_second_process_goes_on(edges: Edges) -> None:
    with Client(edges.grpc_address, ALICE) as client:
        session, model = await model_of(edges, client)
        first = await waiting(model.forward_backward, [datum([1, 2], [2, 3], weights=[1.0, 1.0])])
        second = await waiting(model.optim_step, 0.1)
        assert (first.request_id, second.request_id) == (f"{model.model_id}:1", f"{model.model_id}:2")
        with Client(edges.grpc_address, ALICE) as another:
            again = await waiting(another.open_session, session.session_id)
            going_on = await waiting(again.model, model.model_id)
            third = await waiting(going_on.optim_step, 0.1)
            assert third.request_id == f"{model.model_id}:3"
            again.leave()
        # The first process does not know of that number yet.
        with pytest.raises(Refused) as caught:
            await waiting(model.save_state, "a")
        assert caught.value.status == "ALREADY_EXISTS"
        assert (await waiting(model.save_state, "a")).request_id == f"{model.model_id}:4"
        with pytest.raises(TimeoutError):
            await waiting(second.result, timeout=0.1)
        await edges.answer(
            model.model_id, 2, optim_step=training_pb2.OptimStepResult(metrics={"grad_norm": 1.0})
        )
        assert (await waiting(second.result)).metrics["grad_norm"] == 1.0
        assert (await waiting(client.pending(second.request_id).result)).metrics["grad_norm"] == 1.0
        session.leave()


async def test_work_that_fails_says_who_can_mend_it(edges: Edges) -> None:
    with Client(edges.grpc_address, ALICE) as client:
        session, model = await model_of(edges, client)
        work = await waiting(model.forward_backward, [])
        with pytest.raises(RequestFailed) as caught:
            await waiting(work.result)
        assert caught.value.mine
        missing = client.pending(f"{model.model_id}:77")
        with pytest.raises(RequestFailed) as caught:
            await waiting(missing.result)
        assert caught.value.code == "not_found"
        session.leave()
