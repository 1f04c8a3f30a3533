"""Samplers of one base model that draw by different algorithms are told of."""

from __future__ import annotations

import msgspec
import pytest

from services.common.state.registry import Announcer, ServiceRecord
from services.gateway.placement.model_runners import MIXED, MixedRunners, mixed, sentence
from tests.unit.gateway.edges import Edges


def sampler(name: str, runner: str, base_model: str = "org/one", state: str = "ready") -> ServiceRecord:
    return ServiceRecord(
        kind="sampler", id=name, address="", base_model=base_model, model_runner=runner, state=state
    )


def test_samplers_of_one_base_model_with_different_runners_are_found() -> None:
    records = [sampler("b", "v2"), sampler("a", "v1"), sampler("c", "v2"), sampler("d", "v1", "org/two")]
    assert mixed(records) == {"org/one": {"v1": ["a"], "v2": ["b", "c"]}}
    told = sentence("org/one", mixed(records)["org/one"])
    assert told.startswith("samplers of org/one have different model runners (v1: a; v2: b, c)")


@pytest.mark.parametrize(
    "other",
    [
        sampler("b", "v1"),
        sampler("b", ""),
        sampler("b", "v2", "org/two"),
        sampler("b", "v2", state="draining"),
    ],
    ids=["the same one", "one that does not say", "of another base model", "one that drains"],
)
def test_samplers_that_do_not_differ_are_passed_over(other: ServiceRecord) -> None:
    assert mixed([sampler("a", "v1"), other]) == {}


def test_a_trainer_has_no_runner() -> None:
    assert mixed([sampler("a", "v1"), msgspec.structs.replace(sampler("b", "v2"), kind="trainer")]) == {}


def test_a_gateway_says_it_once_until_they_are_alike_again(caplog: pytest.LogCaptureFixture) -> None:
    runners, first, second = MixedRunners(), sampler("a", "v1"), sampler("b", "v2")
    for _ in range(2):
        runners.look([first, second])
    runners.look([first, second, sampler("c", "v2")])
    assert len(caplog.records) == 1
    assert "org/one" in caplog.text and "--model-runner" in caplog.text
    assert MIXED.collect()[0].samples[0].value == 1
    runners.look([second])
    assert MIXED.collect()[0].samples[0].value == 0
    runners.look([first, second])
    assert len(caplog.records) == 2


async def test_a_gateway_hears_of_it_from_the_registry(
    edges: Edges, caplog: pytest.LogCaptureFixture
) -> None:
    first = edges.announcers["sampler"]
    await first.update(msgspec.structs.replace(first.record, model_runner="v1"))
    other = msgspec.structs.replace(first.record, id="sampler-1", incarnation="other", model_runner="v2")
    second = Announcer(edges.redis, other)
    await second.start()
    try:
        await edges.discovery.refresh()
    finally:
        await second.stop()
    assert "(v1: sampler-0; v2: sampler-1)" in caplog.text
