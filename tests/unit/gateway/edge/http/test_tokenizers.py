"""HTTP: the tokenizers of served base models."""

from __future__ import annotations

from services.common.contract.errors import Starting
from services.gateway.inference.tokenizer_files import TokenizerFiles
from tests.unit.gateway.edges import BASE, Edges
from tinsmith.internal.v1 import sampler_pb2

ANSWER = sampler_pb2.GetTokenizerResponse(
    tokenizer_json='{"version": "1.0"}', chat_template="{{ messages }}", special_tokens={"eos_token": "</s>"}
)


async def test_a_tokenizer_is_fetched_with_a_key_and_by_its_base_models_name(edges: Edges) -> None:
    asked = []

    async def fetch(base_model: str) -> sampler_pb2.GetTokenizerResponse:
        asked.append(base_model)
        return ANSWER

    object.__setattr__(edges.app, "tokenizer_files", TokenizerFiles(edges.app.base_models, fetch))
    async with edges.http() as client:
        for name in (BASE, f"{BASE}:peft:16"):
            found = (await client.get(f"tokenizers/{name}")).json()["files"]
            assert found["tokenizer.json"] == ANSWER.tokenizer_json
            assert "messages" in found["tokenizer_config.json"] and "</s>" in found["tokenizer_config.json"]
        for name in ("org/none", "../../etc/passwd", "x"):
            assert (await client.get(f"tokenizers/{name}")).status_code in (400, 404)
    assert asked == [BASE, BASE]
    async with edges.http("tml-nobody") as stranger:
        assert (await stranger.get(f"tokenizers/{BASE}")).status_code == 401


async def test_without_a_sampler_it_is_told_later(edges: Edges) -> None:
    async def fetch(base_model: str) -> sampler_pb2.GetTokenizerResponse:
        raise Starting("no sampler is running")

    object.__setattr__(edges.app, "tokenizer_files", TokenizerFiles(edges.app.base_models, fetch))
    async with edges.http() as client:
        for _ in range(20):
            # What is counted while it is sent is given back.
            answer = await client.get(f"tokenizers/{BASE}")
            assert (answer.status_code, answer.json()["detail"]) == (
                Starting("").http_status,
                "no sampler is running",
            )


async def test_a_base_model_that_is_not_its_name_says_so(edges: Edges) -> None:
    async with edges.http() as client:
        (model,) = (await client.get("get_server_capabilities")).json()["supported_models"]
    assert model["weights"] == "a directory of the cluster"
