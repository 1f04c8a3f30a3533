"""HTTP: saving training state, and models that go on from it."""

from __future__ import annotations

import msgspec
import pytest
import tinker

from services.common.contract import ids
from services.common.contract.errors import Unavailable
from services.common.state.registry import Announcer
from services.gateway.identity.door import REFUSALS
from services.gateway.identity.key import Caller
from tests.unit.gateway import saved
from tests.unit.gateway.edges import ALICE, BASE, BOB, LORA, Edges, new_model, new_session
from tinsmith.internal.v1 import operation_pb2
from tinsmith.v1 import models_pb2


async def test_a_saved_state_is_known_with_its_metadata_and_lifetime(edges: Edges) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
        path = await saved.save(edges, client, model, 1, "000020", ttl_seconds=7200, user_metadata={"k": "v"})
        info = (await client.post("weights_info", json={"tinker_path": path})).json()
        run = (await client.get(f"training_runs/{model}", params={"access_scope": "accessible"})).json()
    assert (info["base_model"], info["is_lora"], info["lora_rank"]) == (BASE, True, 4)
    read = tinker.types.TrainingRun.model_validate(run)
    assert (read.training_run_id, read.base_model, read.model_owner) == (model, BASE, "alice")
    assert read.user_metadata == {"run": "one"}
    checkpoint = read.last_checkpoint
    assert checkpoint is not None and checkpoint.expires_at is not None
    assert (checkpoint.tinker_path, checkpoint.size_bytes) == (path, len(saved.CONTENT))
    assert checkpoint.user_metadata == {"k": "v"}
    assert (checkpoint.expires_at - checkpoint.time).total_seconds() == pytest.approx(7200, abs=1)
    assert read.last_sampler_checkpoint is None


async def test_a_name_that_is_taken_is_refused_unless_it_may_be_overwritten(edges: Edges) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
        path = await saved.save(edges, client, model, 1, "a")
        again = {"model_id": model, "seq_id": 1, "path": "a"}
        assert (await client.post("save_weights", json=again)).json()["request_id"] == f"{model}:1"
        await client.post("save_weights", json={"model_id": model, "seq_id": 2, "path": "a"})
        assert path in (await saved.failure(client, model, 2))["error"]
        await saved.save(edges, client, model, 3, "a", overwrite=True)


async def test_a_fault_of_the_service_uses_up_no_seq_id(
    edges: Edges, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*arguments: object) -> None:
        raise Unavailable("the checkpoint store cannot be reached")

    async with edges.http() as client:
        model = await new_model(edges, client)
        with monkeypatch.context() as patched:
            patched.setattr(edges.app.checkpoints, "refuse_taken", fail)
            body = {"model_id": model, "seq_id": 1, "path": "a"}
            assert (await client.post("save_weights", json=body)).status_code == 503
        assert await edges.operation(model, 1) is None
        await saved.save(edges, client, model, 1, "a")


async def test_a_model_can_be_created_from_a_saved_state(edges: Edges) -> None:
    async with edges.http() as client, edges.http(BOB) as other:
        model = await new_model(edges, client)
        path = await saved.save(edges, client, model, 1, "final")
        session = await new_session(client)
        body = {"session_id": session, "model_seq_id": 0, "path": path, "optimizer": True}
        response = await client.post("load_weights", json=body)
        assert response.json() == {"request_id": f"{session}:train:0:0"}
        operation = await edges.operation(f"{session}:train:0", 0)
        assert operation is not None
        state = operation.create_model.from_state
        assert (state.source_model_id, state.checkpoint_id, state.optimizer) == (model, "weights/final", True)
        assert operation.create_model.base_model == BASE
        assert not operation.create_model.HasField("lora")
        result = models_pb2.CreateModelResult(lora=LORA)
        await edges.answer(f"{session}:train:0", 0, create_model=result)
        info = await client.post("get_info", json={"model_id": f"{session}:train:0"})
        assert info.json()["lora_rank"] == 4

        theirs = {**body, "session_id": await new_session(other)}
        assert (await other.post("load_weights", json=theirs)).status_code == 404
        missing = {**body, "model_seq_id": 1, "path": path.replace("final", "gone")}
        assert (await client.post("load_weights", json=missing)).status_code == 404
        wrong = {**body, "model_seq_id": 1, "base_model": "org/other"}
        assert (await client.post("load_weights", json=wrong)).status_code == 400


async def test_the_key_of_another_account_opens_its_checkpoints(edges: Edges) -> None:
    async with edges.http() as client, edges.http(BOB) as other:
        path = await saved.save(edges, client, await new_model(edges, client), 1, "a")
        session, model = await new_session(other), await new_model(edges, other)
        made = {"path": path, "optimizer": True, "session_id": session, "model_seq_id": 0}
        loaded = {"path": path, "optimizer": True, "model_id": model, "seq_id": 1}
        assert (await other.post("load_weights", json=made)).status_code == 404
        wrong = await other.post("load_weights", json={**made, "weights_access_token": "tml-nobody"})
        assert wrong.status_code == 403
        assert "no API key" in wrong.json()["detail"]
        token = {"weights_access_token": ALICE}
        assert (await other.post("load_weights", json={**made, **token})).status_code == 200
        assert (await other.post("load_weights", json={**loaded, **token})).status_code == 200
        operation = await edges.operation(model, 1)
        created = await edges.operation(f"{session}:train:0", 0)
    assert operation is not None and operation.load_state.checkpoint_id == "weights/a"
    assert created is not None and created.create_model.from_state.checkpoint_id == "weights/a"


async def test_while_nobody_can_tell_whose_a_key_is_its_number_is_not_used_up(
    edges: Edges, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with edges.http() as client, edges.http(BOB) as other:
        path = await saved.save(edges, client, await new_model(edges, client), 1, "a")
        model = await new_model(edges, other)
        body = {
            **{"path": path, "optimizer": True, "model_id": model, "seq_id": 1},
            "weights_access_token": ALICE,
        }
        known = edges.app.keys.caller_of

        def away(key: str | None) -> Caller:
            if key == ALICE:
                raise Unavailable("the API keys cannot be read")
            return known(key)

        monkeypatch.setattr(edges.app.keys, "caller_of", away)
        assert (await other.post("load_weights", json=body)).status_code == 503
        monkeypatch.undo()
        assert (await other.post("load_weights", json=body)).status_code == 200
        operation = await edges.operation(model, 1)
    assert operation is not None and operation.load_state.checkpoint_id == "weights/a"


async def test_a_wrong_access_token_is_counted_as_a_wrong_key_is(edges: Edges) -> None:
    refusals = REFUSALS.labels("unauthenticated")
    before = refusals._value.get()
    async with edges.http(BOB) as other:
        session = await new_session(other)
        body = {"path": "tinker://x", "optimizer": True, "session_id": session, "model_seq_id": 0}
        wrong = await other.post("load_weights", json={**body, "weights_access_token": "tml-nobody"})
    assert wrong.status_code == 403
    assert refusals._value.get() == before + 1


async def test_a_context_length_after_the_name_is_the_same_base_model_if_it_has_that(edges: Edges) -> None:
    async with edges.http() as client:
        path = await saved.save(edges, client, await new_model(edges, client), 1, "a")
        session = await new_session(client)
        made = {"path": path, "optimizer": True, "session_id": session, "model_seq_id": 0}
        beyond = await client.post("load_weights", json={**made, "base_model": f"{BASE}:peft:999999"})
        assert beyond.status_code == 400
        assert "context length" in beyond.json()["detail"]
        named = await client.post("load_weights", json={**made, "base_model": f"{BASE}:peft:8"})
        assert named.status_code == 200
        lora = {"rank": 4}
        fresh = {
            "session_id": session,
            "model_seq_id": 1,
            "base_model": f"{BASE}:peft:8",
            "lora_config": lora,
        }
        assert (await client.post("create_model", json=fresh)).status_code == 200
        sampled = {"session_id": session, "sampling_session_seq_id": 0, "base_model": f"{BASE}:peft:8"}
        sampler = (await client.post("create_sampling_session", json=sampled)).json()["sampling_session_id"]
        for number in (0, 1):
            operation = await edges.operation(f"{session}:train:{number}", 0)
            assert operation is not None and operation.create_model.base_model == BASE
        assert (await client.get(f"samplers/{sampler}")).json()["base_model"] == BASE


async def test_a_saved_state_can_be_loaded_into_a_model(edges: Edges) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
        path = await saved.save(edges, client, model, 1, "a")
        body = {"model_id": model, "seq_id": 2, "path": path, "optimizer": False, "type": "load_weights"}
        await client.post("load_weights", json=body)
        operation = await edges.operation(model, 2)
        assert operation is not None
        expected = operation_pb2.LoadState(source_model_id=model, checkpoint_id="weights/a", version=1)
        assert operation.load_state == expected


async def test_rank_0_trains_all_weights_from_creation_to_the_next_model(edges: Edges) -> None:
    async with edges.http() as client:
        full = await new_model(edges, client, rank=0)
        adapter = await new_model(edges, client)
        created = await edges.operation(full, 0)
        assert created is not None
        assert created.create_model.HasField("full") and not created.create_model.HasField("lora")
        info = (await client.post("get_info", json={"model_id": full})).json()
        assert info["is_lora"] is False and "lora_rank" not in info
        path = await saved.save(edges, client, full, 1, "a")
        weights = (await client.post("weights_info", json={"tinker_path": path})).json()
        run = (await client.get(f"training_runs/{full}")).json()
        for told in (weights, run):
            assert told["is_lora"] is False and "lora_rank" not in told
        load = {"path": path, "optimizer": True}
        await client.post("load_weights", json={**load, "model_id": adapter, "seq_id": 1})
        assert "all of whose weights are trained" in (await saved.failure(client, adapter, 1))["error"]
        made = {**load, "session_id": ids.session_of(full), "model_seq_id": 7}
        assert (await client.post("load_weights", json=made)).status_code == 200
        info = (await client.post("get_info", json={"model_id": f"{ids.session_of(full)}:train:7"})).json()
    assert info["is_lora"] is False


async def test_a_saved_critic_is_loaded_as_a_critic_only(edges: Edges) -> None:
    async with edges.http() as client:
        critic = await new_model(edges, client, metadata={"model_role": "critic"})
        policy = await new_model(edges, client)
        path = await saved.save(edges, client, critic, 1, "a")
        load = {"path": path, "optimizer": True}
        await client.post("load_weights", json={**load, "model_id": policy, "seq_id": 1})
        assert "a critic of rank 4" in (await saved.failure(client, policy, 1))["error"]
        made = {**load, "session_id": ids.session_of(critic), "model_seq_id": 7}
        contradicted = await client.post(
            "load_weights", json={**made, "user_metadata": {"model_role": "policy"}}
        )
        assert contradicted.status_code == 400
        assert "is of a critic" in contradicted.json()["detail"]
        assert (await client.post("load_weights", json=made)).status_code == 200
        record = await edges.app.models.get("alice", ids.model_id(ids.session_of(critic), 7))
    assert record.role == "critic"


async def test_a_model_goes_on_under_another_name_of_the_same_weights(edges: Edges) -> None:
    trainer = edges.announcers["trainer"].record
    cache = "/hub/models--org--same/snapshots/ab12"
    await edges.announcers["trainer"].update(msgspec.structs.replace(trainer, model_path=cache))
    for name, model_path in (("org/alias", "org/same"), ("org/third", "/models/third")):
        other = msgspec.structs.replace(trainer, id=f"of-{name}", base_model=name, model_path=model_path)
        await Announcer(edges.redis, other).update(other)
    await edges.discovery.refresh()
    async with edges.http() as client:
        model = await new_model(edges, client)
        path = await saved.save(edges, client, model, 1, "a")
        session = await new_session(client)
        body = {"session_id": session, "model_seq_id": 0, "path": path, "optimizer": True}
        refused = await client.post("load_weights", json={**body, "base_model": "org/third"})
        assert refused.status_code == 400
        assert "other weights than org/third" in refused.json()["detail"]
        assert (
            await client.post("load_weights", json={**body, "base_model": "org/alias"})
        ).status_code == 200
        made = await edges.operation(f"{session}:train:0", 0)
        assert made is not None and made.create_model.base_model == "org/alias"
        await edges.answer(f"{session}:train:0", 0, create_model=models_pb2.CreateModelResult(lora=LORA))
        info = await client.post("get_info", json={"model_id": f"{session}:train:0"})
        assert info.json()["model_data"]["model_name"] == "org/alias"
        # What was saved under one name is loaded into a model of the other.
        load = {"model_id": f"{session}:train:0", "seq_id": 1, "path": path, "optimizer": True}
        assert (await client.post("load_weights", json=load)).status_code == 200
        loaded = await edges.operation(f"{session}:train:0", 1)
    assert loaded is not None and loaded.load_state.source_model_id == model
