"""Constraints on their way through vLLM: one library makes all grammars, whoever asked first."""

from __future__ import annotations

import itertools
import json
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import get_tokenizer
from vllm.v1 import structured_output
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.request import StructuredOutputRequest

from services.common.contract.errors import InvalidRequest
from services.sampler.engine.grammars.checking import checked
from services.sampler.engine.sampling import Constraint
from services.sampler.engine.settings import engine_args
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
    params = SamplingParams(structured_outputs=await checked(constraint, parts))
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
        await checked(Constraint(kind, source), parts)
