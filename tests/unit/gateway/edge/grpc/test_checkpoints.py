"""gRPC: checkpoints, exports, runs and sessions, as over HTTP."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.message_factory import GetMessageClass

from services.common.contract import ids
from services.common.process import rpc
from services.common.storage.base import Key
from tests.unit.gateway import saved
from tests.unit.gateway.edges import ALICE, BASE, BOB, Edges, new_model, new_session
from tinsmith.internal.v1 import operation_pb2
from tinsmith.v1 import checkpoints_pb2, models_pb2, service_pb2, service_pb2_grpc, sessions_pb2, types_pb2

METHODS = service_pb2.DESCRIPTOR.services_by_name["TinsmithService"].methods_by_name


class Caller:
    """Calls methods by name with a key."""

    def __init__(self, channel: grpc.aio.Channel, key: str) -> None:
        self._stub = service_pb2_grpc.TinsmithServiceStub(channel)
        self._metadata = (("x-api-key", key),)

    async def __call__(self, method: str, **fields: Any) -> Any:
        request = GetMessageClass(METHODS[method].input_type)(**fields)
        return await getattr(self._stub, method)(request, timeout=10, metadata=self._metadata)

    async def refusal(self, method: str, **fields: Any) -> grpc.StatusCode:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self(method, **fields)
        return caught.value.code()

    async def files(self, path: str) -> dict[str, bytes]:
        """An export's files."""
        request = checkpoints_pb2.ReadExternalWeightsRequest(path=path)
        found: dict[str, bytes] = {}
        async for piece in self._stub.ReadExternalWeights(request, timeout=10, metadata=self._metadata):
            found[piece.file] = found.get(piece.file, b"") + piece.data
            assert len(found[piece.file]) <= piece.file_bytes
        return found


@pytest.fixture
async def callers(edges: Edges) -> AsyncIterator[tuple[Caller, Caller]]:
    async with rpc.channel(edges.grpc_address) as channel:
        yield Caller(channel, ALICE), Caller(channel, BOB)


async def test_checkpoints_are_listed_kept_published_and_deleted(
    edges: Edges, callers: tuple[Caller, Caller]
) -> None:
    alice, bob = callers
    async with edges.http() as http:
        model = await new_model(edges, http)
        first = await saved.save(edges, http, model, 1, "a", user_metadata={"k": "v"}, ttl_seconds=7200)
        second = await saved.save(edges, http, model, 2, "b")
    found = (await alice("GetCheckpoint", path=first)).checkpoint
    assert (found.path, found.model_id, found.base_model) == (first, model, BASE)
    assert (found.kind, found.user_metadata["k"]) == (checkpoints_pb2.CHECKPOINT_KIND_TRAINING, "v")
    assert (found.lora.rank, found.size_bytes, found.public) == (4, len(saved.CONTENT), False)
    assert 7100 < found.expires_at.ToSeconds() - time.time() <= 7200
    everything = await alice("ListCheckpoints")
    assert [one.path for one in everything.checkpoints] == [second, first]
    assert everything.total == 2
    page = await alice("ListCheckpoints", page_size=1)
    assert ([one.path for one in page.checkpoints], page.total) == ([second], 2)
    page = await alice("ListCheckpoints", page_size=1, page_token=page.next_page_token)
    assert ([one.path for one in page.checkpoints], page.next_page_token) == ([first], "")
    assert [one.path for one in (await alice("ListCheckpoints", model_id=model)).checkpoints] == [
        second,
        first,
    ]

    assert await bob.refusal("GetCheckpoint", path=second) is grpc.StatusCode.NOT_FOUND
    await alice("PublishCheckpoint", path=second)
    assert (await bob("GetCheckpoint", path=second)).checkpoint.public
    for method in ("DeleteCheckpoint", "UnpublishCheckpoint"):
        assert await bob.refusal(method, path=second) is grpc.StatusCode.PERMISSION_DENIED
    await alice("UnpublishCheckpoint", path=second)
    assert await bob.refusal("GetCheckpoint", path=second) is grpc.StatusCode.NOT_FOUND

    await alice("SetCheckpointTtl", path=first)
    assert not (await alice("GetCheckpoint", path=first)).checkpoint.HasField("expires_at")
    too_short = await alice.refusal("SetCheckpointTtl", path=first, ttl_seconds=5)
    assert too_short is grpc.StatusCode.INVALID_ARGUMENT
    for _ in range(2):
        await alice("DeleteCheckpoint", path=first)
    assert await bob.refusal("DeleteCheckpoint", path=first) is grpc.StatusCode.NOT_FOUND
    nobodys = "tinker://nobody:train:0/weights/a"
    assert await alice.refusal("DeleteCheckpoint", path=nobodys) is grpc.StatusCode.NOT_FOUND
    assert await alice.refusal("GetCheckpoint", path=first) is grpc.StatusCode.NOT_FOUND
    assert await alice.refusal("GetCheckpoint", path="tinker://../x") is grpc.StatusCode.INVALID_ARGUMENT


async def test_an_export_is_read_file_by_file(edges: Edges, callers: tuple[Caller, Caller]) -> None:
    alice, bob = callers
    async with edges.http() as http:
        model = await new_model(edges, http)
    recipient = "age1cy0su9fwf3gf9mw868g5yut09p6nytfmmnktexz2ya5uqg9vl9sss4euqm"
    sent = await alice("SaveExternal", model_id=model, seq_id=1, ttl_seconds=7200, age_recipients=[recipient])
    assert sent.request_id == f"{model}:1"
    operation = await edges.operation(model, 1)
    assert operation is not None
    assert operation.save_external == operation_pb2.SaveExternal(
        checkpoint_id="external_weights/000001", ttl_seconds=7200, age_recipients=[recipient]
    )
    path = f"tinker://{model}/external_weights/000001"
    content = {"adapter_model.safetensors": saved.CONTENT, "adapter_config.json": b"{}"}
    files = {name: lambda target, data=data: target.write_bytes(data) for name, data in content.items()}
    edges.files.storage.publish(Key(model, "external_weights/000001", 1), files)
    await edges.answer(model, 1, save_external=checkpoints_pb2.SaveExternalResult(path=path, size_bytes=1))
    assert await alice.files(path) == content
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await bob.files(path)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await alice.files(f"tinker://{model}/weights/a")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    refused = await alice("SaveExternal", model_id=model, seq_id=2, age_recipients=["nobody"])
    found = await alice("GetResult", request_id=refused.request_id)
    assert found.result.error.category == types_pb2.ERROR_CATEGORY_USER


async def test_runs_and_sessions_are_found_again(edges: Edges, callers: tuple[Caller, Caller]) -> None:
    alice, bob = callers
    async with edges.http() as http:
        older = await new_session(http)
        model = await new_model(edges, http)
        path = await saved.save(edges, http, model, 1, "a")
    run = (await alice("GetTrainingRun", training_run_id=model)).training_run
    assert (run.model.model_id, run.owner, run.last_checkpoint.path) == (model, "alice", path)
    assert not run.HasField("last_sampler_checkpoint")
    assert time.time() - run.last_request_at.ToSeconds() < 60
    runs = await alice("ListTrainingRuns")
    assert ([one.model.model_id for one in runs.training_runs], runs.total) == ([model], 1)
    assert (await alice("ListTrainingRuns", project_id="none")).total == 0
    assert await bob.refusal("GetTrainingRun", training_run_id=model) is grpc.StatusCode.NOT_FOUND
    await alice("PublishCheckpoint", path=path)
    assert (await bob("GetTrainingRun", training_run_id=model, accessible=True)).training_run.owner == "alice"

    session_id = ids.session_of(model)
    assert list((await alice("ListSessions")).session_ids) == [session_id, older]
    session = (await alice("GetSession", session_id=session_id)).session
    assert (session.session_id, list(session.model_ids), session.finished) == (session_id, [model], False)
    assert await bob.refusal("GetSession", session_id=session_id) is grpc.StatusCode.NOT_FOUND
    await alice("FinishSession", session_id=session_id)
    assert (await alice("GetSession", session_id=session_id)).session.finished


async def test_a_model_is_unloaded_after_all_that_was_sent(
    edges: Edges, callers: tuple[Caller, Caller]
) -> None:
    alice, _ = callers
    async with edges.http() as http:
        model = await new_model(edges, http)
        await saved.save(edges, http, model, 1, "a")
    assert (await alice("UnloadModel", model_id=model)).request_id == f"{model}:2"
    await edges.answer(model, 2, unload_model=models_pb2.UnloadModelResult())
    assert (await alice("UnloadModel", model_id=model)).request_id == f"{model}:2"


async def test_sessions_are_searched_page_by_page(edges: Edges, callers: tuple[Caller, Caller]) -> None:
    alice, bob = callers
    made = []
    for number in range(3):
        metadata = {"run": str(number % 2)}
        new = await alice("CreateSession", display_name=f"Run {number} of mine", user_metadata=metadata)
        made.append(new.session_id)
    await alice("FinishSession", session_id=made[0], reason=sessions_pb2.FINISH_REASON_ERRORED)
    await alice("SetSessionProject", session_id=made[1], project_id="p")
    stranger = await bob.refusal("SetSessionProject", session_id=made[1], project_id="q")
    assert stranger is grpc.StatusCode.NOT_FOUND

    async def search(**fields: Any) -> list[str]:
        return [one.session_id for one in (await alice("SearchSessions", **fields)).sessions]

    assert await search() == made[::-1]
    assert await search(display_name="mine RUN 1") == [made[1]]
    assert await search(user_metadata={"run": "0"}) == [made[2], made[0]]
    assert await search(project_ids=["p"]) == [made[1]]
    finished = [sessions_pb2.SESSION_STATUS_FINISHED]
    assert await search(statuses=finished) == [made[0]]
    assert await search(statuses=finished, finish_reasons=[sessions_pb2.FINISH_REASON_SUCCESS]) == []
    assert await search(statuses=finished, finish_reasons=[sessions_pb2.FINISH_REASON_ERRORED]) == [made[0]]
    assert (await bob("SearchSessions")).sessions == []
    first = await alice("SearchSessions", page_size=2)
    assert [one.session_id for one in first.sessions] == [made[2], made[1]]
    (last,) = (await alice("SearchSessions", page_size=2, page_token=first.next_page_token)).sessions
    assert (last.session_id, last.status) == (made[0], sessions_pb2.SESSION_STATUS_FINISHED)
    for wrong in (
        {"page_token": "x"},
        {"page_token": "nan/x"},
        {"statuses": [0]},
        {"finish_reasons": [sessions_pb2.FINISH_REASON_SUCCESS]},
        {"page_size": 1000},
    ):
        assert await alice.refusal("SearchSessions", **wrong) is grpc.StatusCode.INVALID_ARGUMENT


async def pages(caller: Caller, method: str, field: str, **fields: Any) -> list[Any]:
    """All entries of a list, two to a page."""
    found: list[Any] = []
    token = ""
    for _ in range(20):
        page = await caller(method, page_size=2, page_token=token, **fields)
        found += getattr(page, field)
        token = page.next_page_token
        if not token:
            return found
    raise AssertionError(f"{method} has no last page")


async def test_all_lists_come_in_pages_that_neither_repeat_nor_leave_out_anything(
    edges: Edges, callers: tuple[Caller, Caller]
) -> None:
    alice, _ = callers
    async with edges.http() as http:
        models = [await new_model(edges, http) for _ in range(5)]
        sessions = [ids.session_of(model) for model in models]
        paths = [await saved.save(edges, http, models[0], 1 + number, f"c{number}") for number in range(5)]
    for session in sessions:
        await alice("SetSessionProject", session_id=session, project_id="p")
    assert await pages(alice, "ListSessions", "session_ids") == sessions[::-1]
    for project in ("", "p"):
        runs = await pages(alice, "ListTrainingRuns", "training_runs", project_id=project)
        assert [run.model.model_id for run in runs] == models[::-1]
    for model_id in ("", models[0]):
        listed = await pages(alice, "ListCheckpoints", "checkpoints", model_id=model_id)
        assert [one.path for one in listed] == paths[::-1]
    for method in ("ListSessions", "ListTrainingRuns", "ListCheckpoints"):
        assert await alice.refusal(method, page_size=1001) is grpc.StatusCode.INVALID_ARGUMENT
        assert await alice.refusal(method, page_token="x") is grpc.StatusCode.INVALID_ARGUMENT
    elsewhere = await alice.refusal("ListTrainingRuns", project_id="p", page_token="0.0/x")
    assert elsewhere is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_session_that_moves_between_two_pages_ends_no_walk_and_takes_nobody_along(
    edges: Edges, callers: tuple[Caller, Caller]
) -> None:
    alice, _ = callers
    async with edges.http() as http:
        models = [await new_model(edges, http) for _ in range(5)]
    sessions = [ids.session_of(model) for model in models]
    for session in sessions:
        await alice("SetSessionProject", session_id=session, project_id="p")

    async def page(token: str = "") -> tuple[list[str], str]:
        found = await alice("ListTrainingRuns", project_id="p", page_size=2, page_token=token)
        return [run.model.model_id for run in found.training_runs], found.next_page_token

    first, token = await page()
    assert first == [models[4], models[3]]
    # The last that was shown leaves the project, and one that comes next does too.
    for moved in (3, 2):
        await alice("SetSessionProject", session_id=sessions[moved], project_id="q")
    assert (await page(token))[0] == [models[1], models[0]]
    # It comes back behind the place where the walk was: the next walk has it, this one goes on.
    await alice("SetSessionProject", session_id=sessions[3], project_id="p")
    second, token = await page(token)
    assert (second, token) == ([models[1], models[0]], "")
    assert (await page())[0] == [models[4], models[3]]


async def test_a_checkpoint_that_is_saved_anew_between_two_pages_ends_the_walk_all_the_same(
    edges: Edges, callers: tuple[Caller, Caller]
) -> None:
    alice, _ = callers
    async with edges.http() as http:
        model = await new_model(edges, http)
        paths = [await saved.save(edges, http, model, 1 + number, f"c{number}") for number in range(4)]
        for model_id in ("", model):
            seq_id, found, token = 10 + 10 * len(model_id), [], ""
            for _ in range(5):
                page = await alice("ListCheckpoints", page_size=1, model_id=model_id, page_token=token)
                found += [one.path for one in page.checkpoints]
                token = page.next_page_token
                if not token:
                    break
                # The one that was just shown, and the last one, become the newest.
                await saved.save(edges, http, model, seq_id, found[-1].rpartition("/")[2], overwrite=True)
                seq_id += 1
            assert token == "" and found == paths[::-1]
            paths = [one.path for one in (await alice("ListCheckpoints", model_id=model_id)).checkpoints][
                ::-1
            ]
            assert len(paths) == 4


async def test_what_comes_and_goes_between_two_pages_moves_nothing(
    edges: Edges, callers: tuple[Caller, Caller]
) -> None:
    alice, _ = callers
    async with edges.http() as http:
        model = await new_model(edges, http)
        paths = [await saved.save(edges, http, model, 1 + number, f"c{number}") for number in range(5)]
        for model_id in ("", model):
            first = await alice("ListCheckpoints", page_size=2, model_id=model_id)
            # The newest and the last one that was shown go, and another one comes.
            for shown in first.checkpoints:
                await alice("DeleteCheckpoint", path=shown.path)
            newest = await saved.save(edges, http, model, 7 + bool(model_id), f"new{len(model_id)}")
            token = first.next_page_token
            second = await alice("ListCheckpoints", page_size=2, page_token=token, model_id=model_id)
            at = paths.index(first.checkpoints[-1].path)
            assert [one.path for one in second.checkpoints] == paths[max(0, at - 2) : at][::-1]
            paths = [path for path in [*paths, newest] if path not in [one.path for one in first.checkpoints]]
