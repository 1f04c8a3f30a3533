"""docs/grpc.md says what the contract says."""

from __future__ import annotations

import pytest

from scripts import grpc_docs


def test_the_reference_is_what_the_comments_of_the_contract_say() -> None:
    assert grpc_docs.PAGE.read_text(encoding="utf-8") == grpc_docs.page(), "run: make proto-docs"


def test_every_call_message_and_field_is_in_it() -> None:
    text = grpc_docs.reference()
    for file in grpc_docs.descriptors():
        for service in file.service:
            assert all(f"| `{method.name}` |" in text for method in service.method)
        for message in file.message_type:
            assert f"**{message.name}**" in text
            assert all(f"| `{field.name}` |" in text for field in message.field)


def test_a_page_that_is_out_of_date_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_docs, "_line", lambda comment: "another comment")
    assert grpc_docs.PAGE.read_text(encoding="utf-8") != grpc_docs.page()
