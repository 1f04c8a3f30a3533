"""What the demo sends: the arrays of its datums, and its rewards."""

from __future__ import annotations

import itertools

import pytest

from examples.demo import chat, rl, sft


class WordTokenizer:
    """One token per word; ids are given out in order of appearance."""

    eos_token_id = 0

    def __init__(self, chat_template: str | None = "yes") -> None:
        self.chat_template = chat_template
        self._ids: dict[str, int] = {}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [self._ids.setdefault(word, len(self._ids) + 1) for word in text.split()]

    def decode(self, tokens: list[int]) -> str:
        words = {number: word for word, number in self._ids.items()}
        return " ".join(words[token] for token in tokens)

    def apply_chat_template(
        self, messages: list[dict[str, str]], add_generation_prompt: bool, return_dict: bool
    ) -> list[int]:
        assert add_generation_prompt
        assert not return_dict
        return self.encode(" ".join(f"{message['role']}: {message['content']}" for message in messages))


def test_a_supervised_datum_predicts_each_next_token_and_weighs_only_the_answer() -> None:
    datum = chat.supervised([11, 12, 13], [21, 22])
    assert datum.model_input.to_ints() == [11, 12, 13, 21]
    assert datum.loss_fn_inputs["target_tokens"].to_numpy().tolist() == [12, 13, 21, 22]
    assert datum.loss_fn_inputs["weights"].to_numpy().tolist() == [0.0, 0.0, 1.0, 1.0]


def test_a_reinforced_datum_puts_logprobs_and_advantage_on_the_sampled_tokens_only() -> None:
    datum = chat.reinforced([11, 12, 13], [21, 22], [-0.5, -1.5], advantage=0.25)
    assert datum.model_input.to_ints() == [11, 12, 13, 21]
    assert datum.loss_fn_inputs["target_tokens"].to_numpy().tolist() == [12, 13, 21, 22]
    assert datum.loss_fn_inputs["logprobs"].to_numpy().tolist() == [0.0, 0.0, -0.5, -1.5]
    assert datum.loss_fn_inputs["advantages"].to_numpy().tolist() == [0.0, 0.0, 0.25, 0.25]


def test_a_reinforced_datum_needs_a_logprob_for_every_sampled_token() -> None:
    with pytest.raises(ValueError):
        chat.reinforced([11], [21, 22, 23], [-0.5, -1.5], advantage=1.0)


@pytest.mark.parametrize("template", ["yes", None])
def test_a_prompt_holds_system_question_and_the_start_of_the_answer(template: str | None) -> None:
    tokenizer = WordTokenizer(template)
    text = tokenizer.decode(chat.prompt_tokens(tokenizer, "2 + 2 = ?", "Be brief.", answer_start="2 + 2 ="))
    assert text.endswith("2 + 2 =")
    assert "2 + 2 = ?" in text
    assert text.index("Be brief.") < text.index("?")


def test_an_answer_ends_its_turn() -> None:
    assert chat.answer_tokens(WordTokenizer(), "yes it is") == [1, 2, 3, 0]


def test_no_exam_question_is_among_the_lessons() -> None:
    assert not set(sft.EXAM) & {question for question, _ in sft.LESSONS}


def test_sums_are_additions_that_differ_from_step_to_step_and_repeat_from_run_to_run() -> None:
    first, second = (
        [rl.Sums.expression(entry) for entry in itertools.islice(rl.Sums(), 12)] for _ in range(2)
    )
    assert first == second
    assert all("+" in expression for expression in first)
    assert len(set(first)) > 6


def test_only_the_bare_right_number_earns_the_full_reward() -> None:
    sums = rl.Sums()
    entry = next(iter(sums))
    right = entry["answer"]
    assert sums.reward(f" {right}\n", entry) == 1.0
    assert 0.0 < sums.reward(f" {right}, surely", entry) < 1.0
    assert sums.reward(" no idea", entry) == 0.0
