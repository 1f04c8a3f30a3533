"""The text of a generated sequence, piece by piece."""

from __future__ import annotations

import json

import pytest

from services.gateway.text.generated import Generated, Token
from services.gateway.text.tokenizer import Tokenizer
from services.launcher.tiny_model import write_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory, 512, 512)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    source = (directory / "tokenizer.json").read_text()
    return Tokenizer(source, config["chat_template"], {"eos_token": config["eos_token"]})


def tokens(tokenizer: Tokenizer, text: str) -> list[Token]:
    return [Token(id, -float(place)) for place, id in enumerate(tokenizer.tokens(text, special=False))]


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize("text", ["Question: what is 7 * 8?", "Grüße aus 東京 🗼!", "\U0001f469‍\U0001f680"])
def test_pieces_join_to_the_text_however_the_tokens_are_cut(
    tokenizer: Tokenizer, text: str, size: int
) -> None:
    given, generated = tokens(tokenizer, text), Generated(tokenizer)
    pieces = [generated.push(given[at : at + size]) for at in range(0, len(given), size)]
    pieces.append(generated.finish(ended_at_stop=False))
    assert "".join(piece.text for piece in pieces) == text
    assert [token for piece in pieces for token in piece.tokens] == given
    assert not any("\ufffd" in piece.text for piece in pieces)


@pytest.mark.parametrize("size", [1, 3, 100])
def test_a_text_ends_before_its_stop_string_and_no_part_of_it_is_given_out(
    tokenizer: Tokenizer, size: int
) -> None:
    given = tokens(tokenizer, "one two\n\nthree")
    generated = Generated(tokenizer, ["four", "\n\nthr"])
    pieces = [generated.push(given[at : at + size]) for at in range(0, len(given), size)]
    pieces.append(generated.finish(ended_at_stop=True))
    assert "".join(piece.text for piece in pieces) == "one two"
    assert generated.stop == "\n\nthr"
    assert "".join(tokenizer.piece(token.id) for piece in pieces for token in piece.tokens) == "one two"
    assert generated.count == len(given)


def test_what_only_began_like_a_stop_string_is_given_out_at_the_end(tokenizer: Tokenizer) -> None:
    generated = Generated(tokenizer, ["wonderful"])
    assert generated.push(tokens(tokenizer, "it is won")).text == "it is "
    assert generated.finish(ended_at_stop=False).text == "won"
    assert generated.stop is None


@pytest.mark.parametrize("size", [1, 100])
def test_the_end_of_a_turn_is_counted_and_is_no_part_of_the_text(tokenizer: Tokenizer, size: int) -> None:
    given = tokens(tokenizer, "hello<|im_end|>")
    generated = Generated(tokenizer)
    pieces = [generated.push(given[at : at + size]) for at in range(0, len(given), size)]
    pieces.append(generated.finish(ended_at_stop=True))
    assert "".join(piece.text for piece in pieces) == "hello"
    assert [token for piece in pieces for token in piece.tokens] == given[:-1]
    assert generated.count == len(given)


def test_bytes_that_are_no_character_come_as_replacements_and_hold_nothing_back(
    tokenizer: Tokenizer,
) -> None:
    lone = tokens(tokenizer, "é")[-1]
    generated = Generated(tokenizer)
    text = "".join(generated.push([lone]).text for _ in range(40))
    assert len(text) >= 32
    assert set(text) == {"\ufffd"}
    text += generated.finish(ended_at_stop=False).text
    assert len(text) == 40


def test_a_token_is_told_by_its_own_text(tokenizer: Tokenizer) -> None:
    text = "User: hello<|im_end|>"
    assert "".join(tokenizer.piece(token.id) for token in tokens(tokenizer, text)) == text
