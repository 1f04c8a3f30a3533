"""Every field of OpenAI's API is named here: honoured, or refused when it asks for something."""

from __future__ import annotations

import msgspec
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from services.gateway.edge.inference.unserved import Unserved
from services.gateway.edge.openai import requests

CASES = [
    (completion_create_params.CompletionCreateParamsBase, requests.Completion, requests.COMPLETION_UNSERVED),
    (chat_create_params.CompletionCreateParamsBase, requests.Chat, requests.CHAT_UNSERVED),
]


@pytest.mark.parametrize(("theirs", "ours", "unserved"), CASES)
def test_every_field_that_the_openai_package_can_send_is_known(
    theirs: type, ours: type[msgspec.Struct], unserved: Unserved
) -> None:
    known = {field.name for field in msgspec.structs.fields(ours)}
    assert set(theirs.__annotations__) <= known
    assert unserved.keys() <= known


@pytest.mark.parametrize(("theirs", "ours", "unserved"), CASES)
def test_a_field_that_is_not_served_asks_for_nothing_when_it_is_left_out(
    theirs: type, ours: type[msgspec.Struct], unserved: Unserved
) -> None:
    for field in msgspec.structs.fields(ours):
        if field.name in unserved:
            assert field.default in unserved[field.name][0]
