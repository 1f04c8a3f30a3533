"""HTTP: models, as they are created and told of."""

from pathlib import Path

import pytest

from tests.unit.gateway.edge.http.batches import PROTO, batch, failure
from tests.unit.gateway.edges import BASE, BOB, Edges, new_model, new_session
from tinsmith.v1 import models_pb2


async def test_a_model_is_created_once_however_often_it_is_asked_for(edges: Edges) -> None:
    async with edges.http() as client:
        session = await new_session(client)
        body = {
            "session_id": session,
            "model_seq_id": 3,
            "base_model": BASE,
            "lora_config": {"rank": 4, "seed": 7, "train_mlp": False},
            "optimizer_config": {"type": "adamw"},
            "type": "create_model",
        }
        first = await client.post("create_model", json=body)
        again = await client.post("create_model", json=body)
        other = await client.post("create_model", json={**body, "lora_config": {"rank": 8}})
        named = await client.post("create_model", json={**body, "user_metadata": {"run": "two"}})
    assert first.json() == again.json() == {"request_id": f"{session}:train:3:0"}
    assert other.status_code == named.status_code == 409
    operation = await edges.operation(f"{session}:train:3", 0)
    assert operation is not None
    expected = models_pb2.LoraConfig(rank=4, seed=7, train_attn=True, train_unembed=True)
    assert operation.create_model.lora == expected
    assert operation.create_model.base_model == BASE


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"base_model": "org/other"}, BASE),
        ({"lora_config": {"rank": -1}}, "rank"),
        ({"lora_config": {"rank": 0, "train_mlp": False}}, "rank 0 trains all weights"),
        ({"lora_config": {"rank": 0}, "user_metadata": {"model_role": "critic"}}, "trains an adapter"),
        ({"lora_config": {"rank": 128}}, "--max-lora-rank"),
        ({"lora_config": {"rank": 4, "alpha": 3}}, "alpha"),
        ({"lora_config": None}, "lora_config"),
        ({"optimizer_config": {"type": "dimuon", "version": 1}}, "dimuon"),
        ({"user_metadata": {"a": "b" * 70_000}}, "user_metadata"),
        ({"user_metadata": {"model_role": "reward"}}, "'policy' or 'critic'"),
        (
            {"user_metadata": {"model_role": "critic"}, "lora_config": {"rank": 4, "train_unembed": False}},
            "train_unembed",
        ),
        ({"model_seq_id": -1}, "model_seq_id"),
    ],
)
async def test_a_model_that_cannot_be_had_is_400_with_what_to_change(
    edges: Edges, change: dict, says: str
) -> None:
    async with edges.http() as client:
        body = {
            "session_id": await new_session(client),
            "model_seq_id": 0,
            "base_model": BASE,
            "lora_config": {"rank": 4},
        }
        response = await client.post("create_model", json={**body, **change})
    assert response.status_code == 400
    assert says in response.json()["detail"]


async def test_somebody_elses_model_is_as_one_that_does_not_exist(edges: Edges) -> None:
    async with edges.http() as client, edges.http(BOB) as other:
        model = await new_model(edges, client)
        step = {"model_id": model, "seq_id": 1, "adam_params": {}}
        for path, body in (
            ("optim_step", step),
            ("get_info", {"model_id": model}),
            ("retrieve_future", {"request_id": f"{model}:0"}),
            ("save_weights", {"model_id": model, "seq_id": 1, "path": "a"}),
        ):
            assert (await other.post(path, json=body)).status_code == 404, path
        data = batch(model, 1, [1])
        assert (await other.post("forward_backward", content=data, headers=PROTO)).status_code == 404
        absent = {**step, "model_id": "nobody:train:0"}
        assert (await client.post("optim_step", json=absent)).status_code == 404
        assert (await client.post("optim_step", json={**step, "model_id": "../x"})).status_code == 404


async def test_get_info_tells_model_tokenizer_and_rank(edges: Edges, tmp_path: Path) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
        info = (await client.post("get_info", json={"model_id": model, "type": "get_info"})).json()
    assert info["model_data"] == {
        "arch": "Qwen3ForCausalLM",
        "model_name": BASE,
        "tokenizer_id": str(tmp_path),
    }
    assert (info["is_lora"], info["lora_rank"], info["model_id"]) == (True, 4, model)


async def test_a_container_does_not_take_who_connects_over_loopback_for_one_that_has_its_files(
    edges: Edges, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(vars(edges.app), "near_clients", False)
    async with edges.http() as client:
        model = await new_model(edges, client)
        info = (await client.post("get_info", json={"model_id": model, "type": "get_info"})).json()
    assert info["model_data"] == {"arch": "Qwen3ForCausalLM", "model_name": BASE}


async def test_a_critic_is_made_by_its_metadata_and_keeps_to_its_role(edges: Edges) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client, metadata={"model_role": "critic"})
        operation = await edges.operation(model, 0)
        assert operation is not None
        assert operation.create_model.role == models_pb2.MODEL_ROLE_CRITIC
        await client.post("forward_backward", content=batch(model, 1, [1, 2]), headers=PROTO)
        assert "use ppo_critic" in await failure(client, f"{model}:1")
        for seq_id, save in ((2, {"path": "x"}), (3, {"sampling_session_seq_id": 0})):
            await client.post("save_weights_for_sampler", json={"model_id": model, "seq_id": seq_id, **save})
            assert "critic" in await failure(client, f"{model}:{seq_id}")
