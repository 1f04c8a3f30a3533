"""One fine-tune can be followed from the SDK's call to the gradient and back: in traces, logs and metrics."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tinker import types

from tests.cluster.batches import cross_entropy, tokens
from tests.cluster.conftest import BASE_MODEL, Cluster, free_port, start_cluster, stop_cluster
from tests.collector import Collector, Span, collector, connected
from tests.unit.docs import test_monitoring

PROCESSES = ("gateway-0", "trainer-0", "sampler-0")


@dataclass
class Followed:
    """A cluster that was fine-tuned on, and what it told."""

    cluster: Cluster
    traces: Collector
    metrics: dict[str, str]

    def lines(self, process: str) -> list[dict[str, Any]]:
        """Of its log, without what its libraries print before they are loaded, and a line half written."""
        text = (self.cluster.data_dir / "logs" / f"{process}.log").read_text()
        return [json.loads(line) for line in text.split("\n")[:-1] if line.startswith("{")]

    def line(self, process: str, **fields: str) -> dict[str, Any]:
        """The one with these fields, once it is there: a process logs a call when it has answered."""
        deadline = time.monotonic() + 120
        while True:
            found = [line for line in self.lines(process) if fields.items() <= line.items()]
            if found:
                (only,) = found
                return only
            assert time.monotonic() < deadline, f"{process} logged nothing with {fields}"
            time.sleep(0.1)

    def trace_of(self, name: str, others: set[str]) -> list[Span]:
        """The trace that has a span of this name, and spans of these."""
        return self.traces.wait_for(self.traces.first(name).trace, {name, *others})


@pytest.fixture(scope="module")
def followed(
    tmp_path_factory: pytest.TempPathFactory, model_dir: Path, monkeymodule: pytest.MonkeyPatch
) -> Iterator[Followed]:
    first = free_port()
    with collector() as traces:
        monkeymodule.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", traces.endpoint)
        monkeymodule.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
        options = ("--log-format", "json", "--access-log", "yes", "--metrics-port", str(first))
        cluster = start_cluster(tmp_path_factory.mktemp("followed"), model_dir, *options)
        try:
            fine_tune(cluster)
            scraped = {name: scrape(first + index) for index, name in enumerate(PROCESSES)}
            yield Followed(cluster, traces, scraped)
        finally:
            stop_cluster(cluster)


@pytest.fixture(scope="module")
def monkeymodule() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def fine_tune(cluster: Cluster) -> None:
    training = cluster.service_client().create_lora_training_client(BASE_MODEL, rank=4)
    training.forward_backward([cross_entropy(1, 8)], "cross_entropy").result(timeout=120)
    training.optim_step(types.AdamParams(learning_rate=1e-3)).result(timeout=120)
    sampling = training.save_weights_and_get_sampling_client()
    prompt = types.ModelInput.from_ints(tokens(2, 5))
    params = types.SamplingParams(max_tokens=4, temperature=0.0)
    sampling.sample(prompt, num_samples=1, sampling_params=params).result(timeout=120)


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as reply:
        return reply.read().decode()


def test_a_batch_is_one_trace_from_the_request_to_the_pass_of_the_world(followed: Followed) -> None:
    spans = followed.trace_of("POST /api/v1/forward_backward", {"forward_backward", "redis publish"})
    assert connected(spans)
    assert {span.service for span in spans} == {"tinsmith-gateway", "tinsmith-trainer"}
    names = {span.name for span in spans}
    assert {"redis accept", "execute", "pass of the world", "forward_backward"} <= names


def test_a_publish_is_one_trace_from_the_request_to_the_sampler_s_weights(followed: Followed) -> None:
    receive = "/tinsmith.internal.v1.SamplerService/ReceiveSnapshot"
    spans = followed.trace_of("POST /api/v1/save_weights_for_sampler", {"publish the snapshot", receive})
    assert connected(spans)
    assert {span.service for span in spans} == {"tinsmith-gateway", "tinsmith-trainer", "tinsmith-sampler"}


def test_a_sample_is_one_trace_from_the_request_to_the_engine(followed: Followed) -> None:
    spans = followed.trace_of("POST /api/v1/asample", {"generate", "redis publish_sample"})
    assert connected(spans)
    assert {span.service for span in spans} == {"tinsmith-gateway", "tinsmith-sampler"}


def test_the_logs_of_all_processes_tell_of_a_request_under_the_id_of_its_trace(followed: Followed) -> None:
    for route, process in (("forward_backward", "trainer-0"), ("asample", "sampler-0")):
        accepted = followed.line("gateway-0", route=f"/api/v1/{route}")
        assert accepted["owner"] and accepted["request_id"]
        done = followed.line(process, trace_id=accepted["trace_id"], logger="tinsmith.access")
        assert (done["owner"], done["request_id"]) == (accepted["owner"], accepted["request_id"])
        assert done["outcome"] == "OK"
        assert followed.traces.wait_for(accepted["trace_id"], {f"POST /api/v1/{route}"})


def test_no_log_has_the_key(followed: Followed) -> None:
    for path in (followed.cluster.data_dir / "logs").iterdir():
        assert followed.cluster.api_key not in path.read_text(errors="replace"), path.name


def test_every_series_of_dashboards_and_alerts_is_exposed_by_some_process(followed: Followed) -> None:
    exposed = {
        name
        for text in followed.metrics.values()
        for name in re.findall(r"^([a-zA-Z_:][\w:]*)(?:\{.*\})? ", text, re.MULTILINE)
    }
    declared = {
        name
        for text in followed.metrics.values()
        for name in re.findall(r"^# TYPE ([\w:]+)", text, re.MULTILINE)
    }
    expressions = [expression for _, expression, _ in test_monitoring.panels()]
    expressions += [alert["expr"] for alert in test_monitoring.alerts()]
    for expression in expressions:
        for name in (
            set(re.findall(test_monitoring._SERIES, expression)) - {"up"} - test_monitoring.TARGET_LABELS
        ):
            # What has labels is exposed with its first value; until then there is its type.
            assert name in exposed or re.sub(r"_(bucket|count|sum)$", "", name) in declared, name
