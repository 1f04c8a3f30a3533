"""A served tokenizer as files."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from services.gateway.inference.tokenizer_files import files
from services.launcher.tiny_model import make_tiny_model

pytestmark = pytest.mark.heavy


@dataclass(frozen=True)
class Answer:
    tokenizer_json: str
    chat_template: str = ""
    special_tokens: dict[str, str] = field(default_factory=dict)


def test_what_is_loaded_from_the_files_is_the_tokenizer_that_is_served(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    model, told = tmp_path / "model", tmp_path / "told"
    make_tiny_model(model, vocab=512, hidden=64, layers=1, heads=2, kv_heads=1, intermediate=64, context=64)
    served = AutoTokenizer.from_pretrained(str(model))
    answer = Answer(
        Tokenizer.from_file(str(model / "tokenizer.json")).to_str(),
        served.chat_template,
        {"eos_token": served.eos_token},
    )
    told.mkdir()
    for name, content in files(answer).items():
        (told / name).write_text(content)
    loaded = AutoTokenizer.from_pretrained(str(told))
    chat = [{"role": "user", "content": "What is 17 + 4? Ünïcode <|im_end|>"}]
    assert loaded.encode(chat[0]["content"]) == served.encode(chat[0]["content"])
    assert loaded.apply_chat_template(chat, tokenize=False) == served.apply_chat_template(
        chat, tokenize=False
    )
    assert (loaded.eos_token_id, len(loaded)) == (served.eos_token_id, len(served))


def test_a_model_without_a_template_has_none_in_its_files() -> None:
    config = json.loads(files(Answer("{}"))["tokenizer_config.json"])
    assert config == {"tokenizer_class": "PreTrainedTokenizerFast"}
