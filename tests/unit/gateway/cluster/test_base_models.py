"""What a gateway knows of base models, from what is announced and what is remembered."""

from __future__ import annotations

import pytest

from services.common.contract.errors import InvalidRequest
from services.common.contract.experts.routing import Routing
from services.common.state.known_models import Configured, Facts, KnownModel
from services.common.state.registry import ServiceRecord, View, facts
from services.gateway.cluster import base_models
from services.gateway.cluster.base_models import BaseModel


def record(kind: str, name: str, **fields: object) -> ServiceRecord:
    defaults: dict = {"vocab_size": 100, "context_length": 64, "model_path": "/models/x", "arch": "A"}
    return ServiceRecord(kind=kind, id=f"{kind}-0", address="h:1", base_model=name, **{**defaults, **fields})


def view(*services: ServiceRecord, known: tuple[KnownModel, ...] = ()) -> View:
    kinds = {kind: [one for one in services if one.kind == kind] for kind in ("trainer", "sampler")}
    return View(kinds, {one.name: one for one in known})


def test_the_smallest_limit_of_all_replicas_holds() -> None:
    models = base_models.merge(
        view(
            record("trainer", "a/b", context_length=64),
            record("sampler", "a/b", context_length=32, max_lora_rank=64, max_sequences=512),
            record("sampler", "a/b", context_length=48, max_lora_rank=16, max_sequences=2048),
            record("sampler", "c/d"),
        )
    )
    assert models["a/b"].context_length == 32
    assert models["a/b"].max_sample_rank == 16
    assert models["a/b"].trainable and models["a/b"].sampleable
    assert models["c/d"].sampleable and not models["c/d"].trainable


def test_a_sampler_that_runs_no_adapters_limits_no_rank() -> None:
    adapting = record("sampler", "a/b", max_lora_rank=256)
    base_only = record("sampler", "a/b", max_lora_rank=128, adapts=False)
    assert base_models.merge(view(base_only, adapting))["a/b"].max_sample_rank == 256
    assert base_models.merge(view(base_only))["a/b"].max_sample_rank == 0


def test_what_one_rank_holds_is_known_where_ranks_hold_more_together() -> None:
    together = record("trainer", "a/b", world_size=2, max_sequence_tokens=60, one_rank_tokens=40)
    smaller = record("trainer", "a/b", world_size=4, max_sequence_tokens=64, one_rank_tokens=30)
    model = base_models.merge(view(together, smaller))["a/b"]
    assert (model.max_sequence_tokens, model.one_rank_tokens, model.trainer_ranks) == (60, 30, 2)
    away = KnownModel("a/b", trainer=facts(together))
    assert base_models.merge(view(known=(away,)))["a/b"].one_rank_tokens == 40
    alone = record("trainer", "a/b", max_sequence_tokens=60)
    assert base_models.merge(view(alone))["a/b"].one_rank_tokens == 0


def test_operations_are_cut_for_the_trainer_with_the_smallest_micro_batches() -> None:
    small, large = (record("trainer", "a/b", micro_batch_tokens=tokens) for tokens in (1024, 8192))
    assert base_models.merge(view(large, small))["a/b"].micro_batch_tokens == 1024
    away = KnownModel("a/b", trainer=facts(large))
    assert base_models.merge(view(known=(away,)))["a/b"].micro_batch_tokens == 8192


def test_experts_are_told_where_one_sampler_tells_them_and_that_stays_known() -> None:
    routing = Routing(2, 4, 60)
    telling, other = record("sampler", "a/b", routing=routing), record("sampler", "a/b")
    assert base_models.merge(view(other, telling))["a/b"].sampled_routing == routing
    assert base_models.merge(view(other))["a/b"].sampled_routing is None
    away = KnownModel("a/b", sampler=facts(telling))
    assert base_models.merge(view(known=(away,)))["a/b"].sampled_routing == routing


def test_experts_are_told_of_weights_that_one_sampler_runs_that_tells_them() -> None:
    routing = Routing(2, 4, 60)
    base = record("sampler", "a/b", routing=routing, adapts=False, full_models=False)
    other = record("sampler", "a/b", adapts=True, full_models=True)
    model = base_models.merge(view(base, other))["a/b"]
    assert model.samples_adapters and not model.tells_of_adapters and not model.tells_of_full_models
    full = record("sampler", "a/b", routing=routing, adapts=False)
    model = base_models.merge(view(base, other, full))["a/b"]
    assert model.tells_of_full_models and not model.tells_of_adapters


def test_experts_are_replayed_where_all_trainers_replay_them() -> None:
    replaying, other = record("trainer", "a/b", routing=Routing(2, 4, 60)), record("trainer", "a/b")
    assert base_models.merge(view(replaying, replaying))["a/b"].trained_routing == Routing(2, 4, 60)
    assert base_models.merge(view(replaying, other))["a/b"].trained_routing is None
    assert base_models.merge(view(record("sampler", "a/b")))["a/b"].trained_routing is None


def test_of_what_only_runs_forward_the_smallest_limit_holds_and_stays_known() -> None:
    one, other = (record("trainer", "a/b", max_forward_tokens=tokens) for tokens in (90, 80))
    assert base_models.merge(view(one, other))["a/b"].max_forward_tokens == 80
    away = KnownModel("a/b", trainer=facts(one))
    assert base_models.merge(view(known=(away,)))["a/b"].max_forward_tokens == 90


def test_what_is_away_is_judged_by_what_it_said_last_and_what_lives_by_what_it_says() -> None:
    said = Facts(vocab_size=100, context_length=32, max_lora_rank=8)
    known = KnownModel("a/b", trainer=said, sampler=said)
    away = base_models.merge(view(known=(known,)))["a/b"]
    assert (away.context_length, away.max_train_rank, away.max_sample_rank) == (32, 8, 8)
    assert (away.trainable, away.sampleable, away.trainer_seen, away.sampler_seen) == (True,) * 4
    back = base_models.merge(view(record("trainer", "a/b", max_lora_rank=16), known=(known,)))["a/b"]
    assert (back.max_train_rank, back.max_sample_rank) == (16, 8)


def test_a_configured_model_is_there_before_anything_is_known_of_it() -> None:
    known = KnownModel("a/b", configured=Configured(name="a/b", sampled=False))
    model = base_models.merge(view(known=(known,)))["a/b"]
    assert (model.trainable, model.sampleable, model.trainer_seen) == (True, False, False)
    assert (model.vocab_size, model.context_length, model.tokenizer_id) == (0, 0, "")


def test_a_name_with_a_context_length_is_the_model_if_it_has_so_much() -> None:
    served = {
        "a/b": BaseModel("a/b", context_length=64),
        "c:peft:9": BaseModel("c:peft:9"),
        "d": BaseModel("d"),
    }
    assert base_models.find("a/b:peft:64", served) is served["a/b"]
    assert base_models.find("c:peft:9", served) is served["c:peft:9"]
    # Of what still loads for the first time nothing is known yet.
    assert base_models.find("d:peft:4096", served) is served["d"]
    with pytest.raises(InvalidRequest, match="context length of 64, not of 65"):
        base_models.find("a/b:peft:65", served)
    for unknown in (
        "a/b:peft:",
        "a/b:peft:0",
        "a/b:peft:x",
        "x:peft:64",
        "a/b:64",
        ":peft:64",
        "a/b:peft:" + "9" * 10,
    ):
        assert base_models.find(unknown, served) is None


def test_a_retired_model_is_gone_unless_something_serves_it() -> None:
    retired = KnownModel("a/b", retired=True)
    assert base_models.merge(view(known=(retired,))) == {}
    assert "a/b" in base_models.merge(view(record("trainer", "a/b"), known=(retired,)))


def test_the_tokenizer_of_a_hub_model_is_named_by_its_hub_id() -> None:
    cached = "/root/.cache/huggingface/hub/models--Qwen--Qwen3-0.6B/snapshots/abc"
    assert BaseModel("n", cached, "", 1, 1).tokenizer_id == "Qwen/Qwen3-0.6B"
    assert BaseModel("n", "Qwen/Qwen3-0.6B", "", 1, 1).tokenizer_id == "Qwen/Qwen3-0.6B"
    assert BaseModel("n", "/models/tiny", "", 1, 1).tokenizer_id == "/models/tiny"
