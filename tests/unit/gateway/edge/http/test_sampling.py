"""HTTP: sampling sessions and samples."""

import asyncio
from pathlib import Path

import msgspec
import numpy as np
import pytest
import tinker

from services.gateway.access.limits import Limits
from tests.unit.gateway.edges import ALICE, BASE, BOB, CONTEXT, Edges, new_model, new_session, running
from tinsmith.v1 import checkpoints_pb2, models_pb2, sampling_pb2, types_pb2


async def base_session(client, seq_id: int = 0) -> str:
    body = {
        "session_id": await new_session(client),
        "sampling_session_seq_id": seq_id,
        "base_model": BASE,
    }
    response = await client.post("create_sampling_session", json=body)
    assert response.status_code == 200, response.text
    return response.json()["sampling_session_id"]


def body(session: str, **fields: object) -> dict:
    """What the SDK sends by default."""
    return {
        "sampling_session_id": session,
        "seq_id": 0,
        "num_samples": 2,
        "prompt": {
            "chunks": [{"tokens": [1, 2], "type": "encoded_text"}, {"tokens": [3], "type": "encoded_text"}]
        },
        "sampling_params": {"max_tokens": 5, "temperature": 1.0, "top_k": -1, "top_p": 1.0},
        "prompt_logprobs": False,
        "topk_prompt_logprobs": 0,
        "topk_sample_logprobs": 0,
        "prompt_alt_tokens_k": 0,
        "record_stability_info": False,
        "type": "sample",
        **fields,
    }


async def test_a_sample_reaches_the_sampler_as_it_was_sent(edges: Edges) -> None:
    async with edges.http() as client:
        session = await base_session(client)
        params = {"max_tokens": 7, "seed": 2**64 - 1, "temperature": 0.5, "top_k": 3, "top_p": 0.9}
        sent = body(
            session, sampling_params={**params, "stop": [42]}, prompt_logprobs=True, topk_prompt_logprobs=4
        )
        response = await client.post("asample", json=sent)
        again = await client.post("asample", json=sent)
    answer = response.json()
    assert answer == again.json()
    assert answer["request_id"] == f"{session}:0"
    assert len(set(answer["sample_sequence_ids"])) == 2
    request = await edges.sample(answer["request_id"])
    assert np.frombuffer(request.prompt.data, "<i4").tolist() == [1, 2, 3]
    assert (request.snapshot.model_id, request.snapshot.version) == ("", 0)
    assert (request.num_samples, request.prompt_logprobs, request.topk_prompt_logprobs) == (2, True, 4)
    expected = sampling_pb2.SamplingParams(**params)
    expected.stop.tokens.ids.append(42)
    assert request.params == expected


async def test_scores_reach_the_sampler_as_they_were_asked_for(edges: Edges) -> None:
    target = {
        "data": [9, 8],
        "dtype": "int64",
        "shape": [2, 5],
        "sparse_crow_indices": [0, 0, 2],
        "sparse_col_indices": [1, 4],
    }
    async with edges.http() as client:
        session = await base_session(client)
        sent = body(
            session,
            prompt_logprobs=True,
            topk_sample_logprobs=3,
            target_prompt_logprobs=target,
            prompt_alt_tokens_k=4,
            prompt_logprobs_last_n=2,
        )
        response = await client.post("asample", json=sent)
        request = await edges.sample(response.json()["request_id"])
    assert (request.topk_sample_logprobs, request.prompt_alt_tokens_k) == (3, 4)
    assert request.prompt_logprobs_last_n == 2
    matrix = request.target_prompt_logprobs
    assert list(matrix.shape) == [2, 5]
    arrays = (matrix.values, matrix.crow_indices, matrix.col_indices)
    assert [np.frombuffer(a.data, "<i8").tolist() for a in arrays] == [[9, 8], [0, 0, 2], [1, 4]]


@pytest.mark.parametrize(
    ("stop", "kind", "values"),
    [
        (None, "model_eos", None),
        ([], "never", None),
        ("\n\nUser:", "strings", ["\n\nUser:"]),
        (["a", "b"], "strings", ["a", "b"]),
        ([7, 8], "tokens", [7, 8]),
    ],
)
async def test_the_five_forms_of_stop_are_told_apart(
    edges: Edges, stop: object, kind: str, values: list | None
) -> None:
    async with edges.http() as client:
        session = await base_session(client)
        response = await client.post("asample", json=body(session, sampling_params={"stop": stop}))
        request = await edges.sample(response.json()["request_id"])
    condition = request.params.stop
    assert condition.WhichOneof("kind") == kind
    found = {"strings": list(condition.strings.values), "tokens": list(condition.tokens.ids)}
    assert found.get(kind) == values


@pytest.mark.parametrize("most", [{}, {"max_tokens": CONTEXT}])
async def test_a_sample_ends_at_the_context_that_is_told_whatever_its_replica_takes(
    edges: Edges, most: dict[str, int]
) -> None:
    trainer, sampler = edges.announcers["trainer"], edges.announcers["sampler"]
    await sampler.update(msgspec.structs.replace(sampler.record, context_length=2 * CONTEXT))
    await edges.discovery.refresh()
    async with edges.http() as client:
        session = await base_session(client)
        sent = body(session, sampling_params=most)
        accepted = await client.post("asample", json=sent)
        # What is known of the context by then makes no other request of a repeated one.
        await trainer.update(msgspec.structs.replace(trainer.record, context_length=CONTEXT // 2))
        await edges.discovery.refresh()
        again = await client.post("asample", json=sent)
    assert again.json() == accepted.json()
    request = await edges.sample(accepted.json()["request_id"])
    assert request.params.max_tokens == CONTEXT - 3


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"topk_sample_logprobs": 65}, "topk_sample_logprobs"),
        ({"target_prompt_logprobs": {"data": [1], "dtype": "int64"}}, "target_prompt_logprobs"),
        ({"target_prompt_logprobs": {"data": [1.5], "dtype": "float32"}}, "target_prompt_logprobs"),
        ({"target_prompt_logprobs": {"data": [1], "dtype": "int64", "shape": [1, 1]}}, "2"),
        ({"target_prompt_logprobs": {"data": [-1] * 2, "dtype": "int64", "shape": [2, 1]}}, "no token"),
        ({"prompt_alt_tokens_k": -1}, "prompt_alt_tokens_k"),
        ({"prompt_logprobs_last_n": 1}, "prompt_logprobs_last_n"),
        ({"prompt_logprobs_last_n": 3, "prompt_logprobs": True}, "prompt_logprobs_last_n"),
        ({"record_stability_info": True}, "importance_sampling"),
        ({"base_model": BASE}, "base_model"),
        ({"temperature": 1}, "temperature"),
        ({"prompt": {"chunks": [{"tokens": [100], "type": "encoded_text"}]}}, "vocabulary"),
        ({"prompt": {"chunks": [{"tokens": [2**40], "type": "encoded_text"}]}}, "vocabulary"),
        ({"prompt": {"chunks": [{"data": "", "format": "png", "type": "image"}]}}, "images"),
        ({"prompt": {"chunks": []}}, "empty"),
        ({"num_samples": 0}, "num_samples"),
        ({"sampling_params": {"max_tokens": 0}}, "max_tokens"),
        ({"sampling_params": {"stop": ["a", 1]}}, "stop"),
        ({"sampling_params": {"stop": [2**40]}}, "stop"),
        ({"sampling_params": {"seed": -1}}, "seed"),
        ({"sampling_params": {"presence_penalty": 1}}, "presence_penalty"),
        ({"seq_id": None}, "seq_id"),
    ],
)
async def test_what_is_not_served_or_wrong_is_400_with_its_name(
    edges: Edges, change: dict, says: str
) -> None:
    async with edges.http() as client:
        session = await base_session(client)
        response = await client.post("asample", json=body(session, **change))
        assert response.status_code == 400, response.text
        assert says in response.json()["detail"]
        good = await client.post("asample", json=body(session))
        assert good.status_code == 200


async def test_sessions_belong_to_their_owner(edges: Edges) -> None:
    async with edges.http() as client, edges.http(BOB) as other:
        session = await base_session(client)
        assert (await other.post("asample", json=body(session))).status_code == 404
        assert (await other.get(f"samplers/{session}")).status_code == 404
        assert (await client.post("asample", json=body("nobody:sample:0"))).status_code == 404
        answer = (await client.get(f"samplers/{session}")).json()
    assert answer == {"sampler_id": session, "base_model": BASE}


async def test_a_lost_sample_is_410_so_that_the_client_samples_anew(edges: Edges) -> None:
    async with edges.http() as client:
        session = await base_session(client)
        for request_id in (f"{session}:5", "nobody:sample:0:5"):
            response = await client.post("retrieve_future", json={"request_id": request_id})
            assert response.status_code == 410


async def test_a_save_does_not_take_a_sampling_session_that_exists(edges: Edges) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
        opened = {"session_id": model.split(":")[0], "sampling_session_seq_id": 3, "base_model": BASE}
        assert (await client.post("create_sampling_session", json=opened)).status_code == 200
        body = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 3}
        assert (await client.post("save_weights_for_sampler", json=body)).status_code == 200
        answer = (await client.post("retrieve_future", json={"request_id": f"{model}:1"})).json()
    assert answer["category"] == "user"
    assert "use the next sampling_session_seq_id" in answer["error"]


async def test_a_sampling_session_that_exists_is_not_opened_on_other_weights(edges: Edges) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
        session = model.split(":")[0]
        named = {"model_id": model, "seq_id": 1, "path": "a", "kind": "snapshot"}
        await client.post("save_weights_for_sampler", json=named)
        path = f"tinker://{model}/sampler_weights/a"
        saved = checkpoints_pb2.SaveForSamplerResult(path=path, version=1, size_bytes=10)
        await edges.answer(model, 1, save_for_sampler=saved)
        opening = {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}
        first = await client.post("create_sampling_session", json=opening)
        again = await client.post("create_sampling_session", json=opening)
        assert first.json() == again.json()
        other = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE}
        assert (await client.post("create_sampling_session", json=other)).status_code == 409
        sampler = await client.get(f"samplers/{session}:sample:0")
        assert sampler.json() == {
            "sampler_id": f"{session}:sample:0",
            "base_model": BASE,
            "model_path": path,
        }
        sample = await client.post("asample", json=body(f"{session}:sample:0"))
        request = await edges.sample(sample.json()["request_id"])
        assert (request.snapshot.model_id, request.snapshot.version) == (model, 1)
        run = (await client.get(f"training_runs/{model}")).json()
        assert run["last_sampler_checkpoint"]["tinker_path"] == path


@pytest.mark.parametrize(
    ("change", "status", "says"),
    [
        ({"base_model": "org/other"}, 400, BASE),
        ({}, 400, "base_model"),
        ({"model_path": "tinker://nobody:train:0/sampler_weights/a"}, 404, "nobody"),
        ({"model_path": "tinker://nobody:train:0/weights/a"}, 400, "sampler_weights"),
        ({"model_path": "/etc/passwd"}, 400, "tinker://"),
    ],
)
async def test_a_session_on_what_cannot_be_sampled_is_refused(
    edges: Edges, change: dict, status: int, says: str
) -> None:
    async with edges.http() as client:
        opening = {"session_id": await new_session(client), "sampling_session_seq_id": 0, **change}
        response = await client.post("create_sampling_session", json=opening)
    assert response.status_code == status
    assert says in response.json()["detail"]


def sequence(tokens: list[int]) -> sampling_pb2.SampledSequence:
    shape = [len(tokens)]
    return sampling_pb2.SampledSequence(
        stop_reason=sampling_pb2.STOP_REASON_STOP,
        tokens=types_pb2.Tensor(
            dtype=types_pb2.DATA_TYPE_INT32, shape=shape, data=np.array(tokens, "<i4").tobytes()
        ),
        logprobs=types_pb2.Tensor(
            dtype=types_pb2.DATA_TYPE_FLOAT32, shape=shape, data=np.zeros(len(tokens), "<f4").tobytes()
        ),
    )


async def test_the_sdk_samples_from_an_ephemeral_save(edges: Edges) -> None:
    """save_weights_and_get_sampling_client and sample by the real SDK; the test is trainer and sampler."""

    def use(loop: asyncio.AbstractEventLoop) -> tinker.types.SampleResponse:
        def run(coroutine: object) -> None:
            asyncio.run_coroutine_threadsafe(coroutine, loop).result(20)  # type: ignore[arg-type]

        async def answer(model: str, seq_id: int, **result: object) -> None:
            while await edges.operation(model, seq_id) is None:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            await edges.answer(model, seq_id, **result)

        async def answer_sample(request_id: str) -> None:
            # It is listed before it is written.
            while not isinstance(await edges.samples.claim(request_id, "gateway-0", "gateway-0"), bytes):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            request = await edges.sample(request_id)
            assert request.snapshot.version == 1
            result = sampling_pb2.SampleResult(sequences=[sequence([4, 5]), sequence([6])])
            await edges.answer_sample(request_id, result)

        service = tinker.ServiceClient(base_url=edges.base_url, api_key=ALICE)
        creating = service.create_lora_training_client(base_model=BASE, rank=4)
        session = service.holder.get_session_id()
        run(answer(f"{session}:train:0", 0, create_model=models_pb2.CreateModelResult()))
        saving = creating.result(20).save_weights_and_get_sampling_client()
        saved = checkpoints_pb2.SaveForSamplerResult(sampling_session_id=f"{session}:sample:0", version=1)
        run(answer(f"{session}:train:0", 1, save_for_sampler=saved))
        sampler = saving.result(20)
        future = sampler.sample(tinker.ModelInput.from_ints([1, 2]), 2, tinker.SamplingParams(max_tokens=4))
        run(answer_sample(f"{session}:sample:0:0"))
        response = future.result(20)
        service.close("success").result(20)
        return response

    response = await asyncio.to_thread(use, asyncio.get_running_loop())
    assert [list(found.tokens) for found in response.sequences] == [[4, 5], [6]]
    assert len({found.sequence_id for found in response.sequences}) == 2


async def test_owners_share_no_cached_prefixes_of_a_base_model_and_one_owners_clients_do(
    edges: Edges,
) -> None:
    namespaces = []
    for key in (ALICE, ALICE, BOB):
        async with edges.http(key) as client:
            session = await base_session(client)
            promise = (await client.post("asample", json=body(session))).json()
            namespaces.append((await edges.sample(promise["request_id"])).cache_namespace)
    assert namespaces == ["owner/alice", "owner/alice", "owner/bob"]


async def test_an_inflight_save_makes_a_session_with_a_cache_of_its_own(edges: Edges) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
        for seq_id, kind in ((1, "inflight"), (2, "snapshot")):
            save = {"model_id": model, "seq_id": seq_id, "sampling_session_seq_id": seq_id, "kind": kind}
            assert (await client.post("save_weights_for_sampler", json=save)).status_code == 200
            operation = await edges.operation(model, seq_id)
            assert operation is not None
            assert operation.save_for_sampler.inflight is (kind == "inflight")
            session = f"{model.split(':')[0]}:sample:{seq_id}"
            saved = checkpoints_pb2.SaveForSamplerResult(sampling_session_id=session, version=seq_id)
            await edges.answer(model, seq_id, save_for_sampler=saved)
            promise = (await client.post("asample", json=body(session))).json()
            request = await edges.sample(promise["request_id"])
            assert request.cache_namespace == (session if kind == "inflight" else "owner/alice")
            assert request.snapshot.version == seq_id


async def test_a_save_that_the_sdk_sends_again_with_another_session_number_is_the_same(edges: Edges) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
        save = {"model_id": model, "seq_id": 1, "kind": "snapshot"}
        first = await client.post("save_weights_for_sampler", json={**save, "sampling_session_seq_id": 0})
        again = await client.post("save_weights_for_sampler", json={**save, "sampling_session_seq_id": 1})
        assert (again.status_code, again.json()) == (200, first.json())
        operation = await edges.operation(model, 1)
        assert operation is not None
        assert operation.save_for_sampler.sampling_session_id.endswith(":sample:0")
        other = {**save, "sampling_session_seq_id": 2, "kind": "inflight"}
        assert (await client.post("save_weights_for_sampler", json=other)).status_code == 409


async def test_a_full_gateway_says_429_before_it_takes_anything(redis_url: str, tmp_path: Path) -> None:
    limits = Limits(waiting_sequences=8)
    async with (
        running(redis_url, tmp_path, limits) as edges,
        edges.http() as client,
        edges.http(BOB) as other,
    ):
        session, others = await base_session(client), await base_session(other)
        for seq_id in range(2):
            assert (await client.post("asample", json=body(session, seq_id=seq_id))).status_code == 200
        refused = await client.post("asample", json=body(session, seq_id=2))
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert await edges.samples.samples_of("gateway-0") == {f"{session}:0", f"{session}:1"}
        assert not await edges.redis.exists(f"tinsmith:future:{{{session}}}:2")
        unread = await client.post("asample", content=b"what it is does not matter")
        assert unread.status_code == 429
        assert (await other.post("asample", json=body(others))).status_code == 200
        assert (await other.post("asample", json=body(others, seq_id=1, num_samples=3))).status_code == 429
