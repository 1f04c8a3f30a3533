"""A constraint as vLLM takes it, or why no grammar can be made of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

from vllm import SamplingParams as VllmParams
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import StructuredOutputsParams, check_json_nesting
from vllm.v1.engine.input_processor import InputProcessor

from services.common.contract.errors import InvalidRequest
from services.sampler.engine.grammars.patterns import check_pattern
from services.sampler.engine.grammars.schemas import check_schema
from services.sampler.engine.sampling import Constraint

BACKEND = "xgrammar"
"""Of vLLM's backends the one that makes all grammars. Left to itself the front end would choose one for each
request, by what it asks for, and the engine's core keep to the first one's for all."""


async def checked(constraint: Constraint | None, processor: InputProcessor) -> StructuredOutputsParams | None:
    """As `parsed`, in a thread; nothing of no constraint."""
    if constraint is None:
        return None
    return await asyncio.to_thread(parsed, constraint, processor)


def parsed(constraint: Constraint, processor: InputProcessor) -> StructuredOutputsParams:
    """A constraint that XGrammar enforces as a whole. May take long, and lets the rest of the process run:
    what takes long is C++.

    Raises:
        InvalidRequest: no grammar can be made of it, or one that would admit more.
    """
    params = VllmParams(structured_outputs=_asked(constraint))
    assert params.structured_outputs is not None
    try:
        _check_enforced(constraint)
        params._validate_structured_outputs(
            processor.model_config, processor.structured_outputs_config, processor.tokenizer
        )
    except (VLLMClientError, ValueError) as error:
        raise InvalidRequest(str(error)) from error
    return params.structured_outputs


def _asked(constraint: Constraint) -> StructuredOutputsParams:
    match constraint.kind:
        case "json_schema":
            return StructuredOutputsParams(json=constraint.source)
        case "structural_tag":
            return StructuredOutputsParams(structural_tag=constraint.source)
        case "regex":
            return StructuredOutputsParams(regex=constraint.source)


def _check_enforced(constraint: Constraint) -> None:
    """Raises InvalidRequest where XGrammar would pass over something, and ValueError where JSON is none."""
    if constraint.kind == "regex":
        check_pattern(constraint.source, "the regex")
        return
    check_json_nesting(constraint.source, structural_tag=constraint.kind == "structural_tag")
    found = json.loads(constraint.source)
    if constraint.kind == "json_schema":
        check_schema(found)
        return
    for number, schema in enumerate(_tagged(found), start=1):
        check_schema(schema, f"JSON Schema {number} of the structural tag")


def _tagged(tag: Any) -> Iterator[Any]:
    """The schemas in a structural tag, in order. vLLM's own check looks at none of them."""
    if isinstance(tag, list):
        for each in tag:
            yield from _tagged(each)
    elif isinstance(tag, dict):
        for name, each in tag.items():
            if name in ("json_schema", "schema"):
                yield each
            else:
                yield from _tagged(each)
