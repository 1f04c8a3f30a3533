"""What the cluster serves, of the records of its services."""

from services.common.state.registry import ServiceRecord
from services.gateway.cluster import base_models
from services.gateway.cluster.base_models import BaseModel


def record(kind: str, name: str, **fields: object) -> ServiceRecord:
    defaults: dict = {"vocab_size": 100, "context_length": 64, "model_path": "/models/x", "arch": "A"}
    return ServiceRecord(kind=kind, id=f"{kind}-0", address="h:1", base_model=name, **{**defaults, **fields})


def test_the_smallest_limit_of_all_replicas_holds() -> None:
    models = base_models.merge(
        [record("trainer", "a/b", context_length=64)],
        [
            record("sampler", "a/b", context_length=32, max_lora_rank=64, max_sequences=512),
            record("sampler", "a/b", context_length=48, max_lora_rank=16, max_sequences=2048),
            record("sampler", "c/d"),
        ],
    )
    assert models["a/b"].context_length == 32
    assert models["a/b"].max_sample_rank == 16
    assert models["a/b"].max_samples == 512
    assert models["a/b"].trainable and models["a/b"].sampleable
    assert models["c/d"].sampleable and not models["c/d"].trainable


def test_the_tokenizer_of_a_hub_model_is_named_by_its_hub_id() -> None:
    cached = "/root/.cache/huggingface/hub/models--Qwen--Qwen3-0.6B/snapshots/abc"
    assert BaseModel("n", cached, "", 1, 1).tokenizer_id == "Qwen/Qwen3-0.6B"
    assert BaseModel("n", "Qwen/Qwen3-0.6B", "", 1, 1).tokenizer_id == "Qwen/Qwen3-0.6B"
    assert BaseModel("n", "/models/tiny", "", 1, 1).tokenizer_id == "/models/tiny"
