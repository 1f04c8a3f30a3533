"""docs/grpc.md says what the contract says."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from scripts import grpc_docs
from tests import go_example

ROOT = Path(__file__).resolve().parents[3]
PUBLIC = sorted((ROOT / "proto" / "tinsmith" / "v1").glob("*.proto"))


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


def test_the_commands_for_go_make_one_package_of_all_files(tmp_path: Path) -> None:
    commands = go_example.printed()
    assert "protoc -Iproto" in commands
    # They take the place of what the files say themselves, which has to be one package, too.
    names = {path: re.findall(r'^option go_package = "(.*)";$', path.read_text(), re.M) for path in PUBLIC}
    assert set(map(tuple, names.values())) == {(f"{go_example.PACKAGE};tinsmithv1",)}
    printed = subprocess.run(
        ["bash", "-euc", commands.replace("protoc ", "printf '%s\\n' ")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    (option,) = [word.removeprefix("--go_opt=") for word in printed if word.startswith("--go_opt=")]
    told = dict(part.split("=") for part in option.split(","))
    files = {str(path.relative_to(ROOT / "proto")) for path in PUBLIC}
    assert told == {
        "module": "example.com/mine",
        **{f"M{file}": "example.com/mine/tinsmithv1" for file in files},
    }
    assert files <= set(printed)
    program = (tmp_path / "main.go").read_text()
    assert '\tpb "example.com/mine/tinsmithv1"\n' in program
    assert go_example.PACKAGE not in program
