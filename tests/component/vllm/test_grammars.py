"""Constraints on their way through vLLM: one library makes all grammars, whoever asked first."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import get_tokenizer
from vllm.v1 import structured_output
from vllm.v1.engine import FinishReason
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.request import StructuredOutputRequest

from services.common.contract.errors import InvalidRequest, Overloaded
from services.sampler.engine.grammars import checking, core, makers
from services.sampler.engine.grammars.checking import Checks
from services.sampler.engine.grammars.steps import Busy, InSteps
from services.sampler.engine.sampling import Constraint
from services.sampler.engine.settings.arguments import engine_args
from tests.component.sampler.process import make_model
from tests.unit.sampler.engine.test_settings import config_of

TAG = {"type": "tag", "begin": "<a>", "content": {"type": "json_schema", "json_schema": {}}, "end": "</a>"}


def tagged(schema: Any) -> Constraint:
    content = {"type": "json_schema", "json_schema": schema}
    form = {"tags": [{**TAG, "content": content}], "separator": "", "type": "tags_with_separator"}
    return Constraint("structural_tag", json.dumps({"type": "structural_tag", "format": form}))


ENFORCED = (
    Constraint("json_schema", '{"type": "integer", "minimum": 3}'),
    Constraint("regex", "[ab]+"),
    tagged({"type": "object", "properties": {"a": {"type": "string"}}}),
)
REFUSED = (
    (
        Constraint("json_schema", '{"type": "integer", "multipleOf": 2}'),
        "^# of the JSON Schema has multipleOf",
    ),
    (
        Constraint("json_schema", '{"type": "array", "uniqueItems": true}'),
        "uniqueItems, which is not enforced",
    ),
    (Constraint("json_schema", '{"allOf": [{"type": "string"}, {"enum": ["a"]}]}'), "allOf of 2"),
    (Constraint("regex", "a(?=b)"), "Lookahead is not supported"),
    (Constraint("regex", "a$b"), "the regex has an anchor"),
    (
        tagged({"type": "array", "items": {"not": {}}}),
        "^#/items of JSON Schema 1 of the structural tag has not",
    ),
)


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """What vLLM's front end and its engine's core are started with."""
    directory = tmp_path_factory.mktemp("model")
    arguments = engine_args(config_of(directory / "config", "qwen3", vocab_size=512), "cuda")
    model = SimpleNamespace(
        is_diffusion=False,
        skip_tokenizer_init=False,
        hf_config=SimpleNamespace(model_type="qwen3"),
        get_vocab_size=lambda: 512,
    )
    return SimpleNamespace(
        model_config=model,
        structured_outputs_config=arguments.structured_outputs_config,
        tokenizer=get_tokenizer(make_model(Path(directory / "model"), tied=True)),
        scheduler_config=SimpleNamespace(max_num_seqs=8),
        parallel_config=SimpleNamespace(distributed_executor_backend="uni"),
        speculative_config=None,
    )


async def grammar_of(constraint: Constraint, parts: Any, manager: StructuredOutputManager) -> Any:
    """What the engine's core makes of a constraint that the front end has checked."""
    params = SamplingParams(structured_outputs=await Checks(parts).check(constraint))
    asked = StructuredOutputRequest.from_sampling_params(params)
    manager.grammar_init(
        SimpleNamespace(request_id="r", sampling_params=params, structured_output_request=asked)
    )
    assert asked is not None and isinstance(asked._grammar, Future)
    return asked._grammar.result(60)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("refused_first", [True, False])
async def test_what_is_enforced_and_what_is_refused_is_so_in_any_order(
    order: tuple[int, ...], refused_first: bool, parts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structured_output, "cached_tokenizer_from_config", lambda **_: parts.tokenizer)
    manager = StructuredOutputManager(parts)
    for place in order:
        if not refused_first:
            assert await grammar_of(ENFORCED[place], parts, manager)
        for constraint, named in REFUSED:
            with pytest.raises(InvalidRequest, match=named):
                await grammar_of(constraint, parts, manager)
        assert await grammar_of(ENFORCED[place], parts, manager)
    manager.clear_backend()


@pytest.mark.parametrize("source", ["{", "[" * 2000, '{"type": "integer", "type": "thing"}', '"text"'])
@pytest.mark.parametrize("kind", ["json_schema", "structural_tag"])
async def test_what_is_no_schema_is_the_requests_own_fault(kind: Any, source: str, parts: Any) -> None:
    with pytest.raises(InvalidRequest):
        await Checks(parts).check(Constraint(kind, source))


async def test_checks_that_take_long_end_and_keep_others_and_files_waiting_for_so_long_only(
    monkeypatch: pytest.MonkeyPatch, parts: Any
) -> None:
    over, quick = threading.Event(), ENFORCED[0]
    own = checking.parsed

    def parsed(constraint: Constraint, processor: Any) -> Any:
        return own(constraint, processor) if constraint is quick else over.wait(60)

    monkeypatch.setattr(checking, "parsed", parsed)
    checks = Checks(parts, threads=2, seconds=0.2)
    assert await checks.check(None) is None
    try:
        slow = [asyncio.create_task(checks.check(Constraint("regex", "a"))) for _ in range(2)]
        await asyncio.sleep(0)
        waiting = [asyncio.create_task(checks.check(quick)) for _ in range(9)]
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "a file"), 10) == "a file"
        for task in slow:
            with pytest.raises(
                InvalidRequest, match=r"no grammar came of this regex in 0.2 s; send"
            ) as refused:
                await task
            assert refused.value.code == "constraint_too_large"
        for task in waiting:
            with pytest.raises(Overloaded, match="all threads that check constraints"):
                await task
    finally:
        over.set()
    assert await checks.check(quick) is not None


def until(true: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_grammar_that_takes_too_long_fails_alone_and_those_that_find_no_thread_say_so(
    monkeypatch: pytest.MonkeyPatch, parts: Any
) -> None:
    monkeypatch.setattr(structured_output, "cached_tokenizer_from_config", lambda **_: parts.tokenizer)
    monkeypatch.setattr(makers, "MOST_LONG", 0)
    manager = StructuredOutputManager(parts)
    manager.executor, over = ThreadPoolExecutor(1), threading.Event()
    make = manager._create_grammar
    monkeypatch.setattr(manager, "_create_grammar", lambda one: over.wait(60) if one.slow else make(one))
    ended: list[Any] = []
    scheduler: Any = SimpleNamespace(
        structured_output_manager=manager,
        update_from_output=lambda *_: {0: SimpleNamespace(outputs=ended)},
    )
    core.install(scheduler, seconds=4)

    def ask(name: str, constraint: Constraint, slow: bool) -> StructuredOutputRequest:
        params = SamplingParams(structured_outputs=checking.parsed(constraint, parts))
        made = StructuredOutputRequest.from_sampling_params(params)
        assert made is not None
        manager.grammar_init(
            SimpleNamespace(
                request_id=name, sampling_params=params, structured_output_request=made, slow=slow
            )
        )
        return made

    long, twin = (ask(name, ENFORCED[0], True) for name in ("long", "twin"))
    behind = ask("behind", ENFORCED[1], False)
    try:
        assert long.grammar is twin.grammar is behind.grammar is None
        until(lambda: behind.grammar)
        assert isinstance(behind.grammar, Busy)
        assert long.grammar is twin.grammar is None
        until(lambda: long.grammar and twin.grammar)
        assert isinstance(long.grammar, TimeoutError) and isinstance(twin.grammar, TimeoutError)
    finally:
        over.set()
    ended += [
        SimpleNamespace(request_id=each, finish_reason=FinishReason.ERROR) for each in ("long", "behind")
    ]
    for output in ended:
        output.stop_reason = None
    scheduler.update_from_output(None, None)
    assert [output.stop_reason for output in ended] == [None, core.BUSY]
    later = ask("later", ENFORCED[1], False)
    until(lambda: later.grammar)
    assert isinstance(later.grammar, InSteps)
    manager.clear_backend()
