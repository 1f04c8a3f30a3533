"""A tiny model that has learned to answer as the cookbook's recipes ask, by guessing.

Invariant: to each kind of question it gives answers of the right form, most of the time, of which few are
right. So rewards differ within a group, and training has something to move.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tinker_cookbook import renderers
from tinker_cookbook.recipes.math_rl.arithmetic_env import ArithmeticEnv
from tinker_cookbook.recipes.math_rl.math_env import MathEnv
from tinker_cookbook.recipes.multiplayer_rl.guess_number import env as guess_number
from tinker_cookbook.recipes.multiplayer_rl.twenty_questions import env as twenty_questions
from tinker_cookbook.recipes.preference.shorter.env import CONVO_PREFIX
from tinker_cookbook.recipes.prompt_distillation.create_data import LANGUAGE_CLASSIFICATION_PROMPT
from tinker_cookbook.recipes.rubric.generate_data import generate_one
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tokenizers import AddedToken, Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

from services.launcher.tiny_model import make_tiny_model

CONTEXT = 4096
RENDERERS = ("qwen3_5", "qwen3_5_disable_thinking")
WORDS = twenty_questions._load_words_from_file()[:4]
"""The nouns that a recipe with batches of two asks for in its first two steps."""

RL_LOOP_SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
"""What rl_loop, which keeps it in a local variable, adds to each question."""

Conversation = list[renderers.Message]
Lesson = Callable[[random.Random], Conversation]


SENTENCES = (
    ("en", "The tinsmith lives in the old house."),
    ("de", "Der Klempner wohnt nicht in dem alten Haus."),
    ("fr", "Le ferblantier est avec les amis de la ville."),
    ("es", "El hojalatero no es de la ciudad."),
)
"""What a recipe has classified, with what it is."""


def said(role: str, content: str) -> renderers.Message:
    return {"role": role, "content": content}


def a_sum(rng: random.Random) -> Conversation:
    guess = str(rng.randint(0, 200))
    tail = "" if rng.random() < 0.5 else " or some other number, who knows"
    question = said("user", f"What is {rng.randint(0, 100)} + {rng.randint(0, 100)}?")
    return [*ArithmeticEnv.standard_fewshot_prefix(), question, said("assistant", guess + tail)]


def a_problem(rng: random.Random) -> Conversation:
    asked = f"How many tins are in {rng.randint(2, 99)} boxes?"
    question = said("user", asked + rng.choice([MathEnv.question_suffix(), RL_LOOP_SUFFIX]))
    before = rng.choice([[], MathEnv.standard_fewshot_prefix()])
    return [*before, question, said("assistant", f"\\boxed{{{rng.randint(0, 9)}}}")]


def an_introduction(rng: random.Random) -> Conversation:
    words = rng.choices(["tin", "iron", "small", "model", "maker", "friend"], k=rng.randint(1, 9))
    return [*CONVO_PREFIX, said("assistant", "I am a " + " ".join(words))]


def a_number(rng: random.Random) -> Conversation:
    turns = [said("system", guess_number.SYSTEM_PROMPT)]
    for _ in range(rng.randint(0, 3)):
        turns += [
            said("assistant", f"Guess: {rng.randint(0, 1024)}"),
            said("user", rng.choice(["Too low", "Too high"])),
        ]
    form = "Guess: {}" if rng.random() < 0.6 else "It may be {}"
    return [*turns, said("assistant", form.format(rng.randint(0, 1024)))]


def a_question(rng: random.Random) -> Conversation:
    turns = [said("system", twenty_questions.PLAYER_SYSTEM_PROMPT)]
    for _ in range(rng.randint(0, 3)):
        turns += [said("assistant", "Is it made of tin?"), said("user", rng.choice(["yes", "no"]))]
    guess = f"Guess: {rng.choice(WORDS)}" if rng.random() < 0.1 else "Is it made of tin?"
    return [*turns, said("assistant", guess)]


def a_game(rng: random.Random) -> Conversation:
    """As `a_question`, but a whole game of many guesses."""
    turns = [said("system", twenty_questions.PLAYER_SYSTEM_PROMPT)]
    for _ in range(rng.randint(0, 19)):
        turns += [said("assistant", _guess(rng)), said("user", rng.choice(["yes", "no"]))]
    return [*turns, said("assistant", _guess(rng))]


def _guess(rng: random.Random) -> str:
    return rng.choice(["Is it made of tin?", *(f"Guess: {word}" for word in WORDS)])


def a_language(rng: random.Random) -> Conversation:
    label, sentence = rng.choice(SENTENCES)
    asked = LANGUAGE_CLASSIFICATION_PROMPT.format(text=sentence)
    return [said("user", asked), said("assistant", f"Final Answer: {label}")]


def a_yes_or_no(rng: random.Random) -> Conversation:
    secret = twenty_questions.ANSWERER_SYSTEM_PROMPT.format(answer=rng.choice(WORDS))
    question = rng.choice(["Is it made of tin?", f"Guess: {rng.choice(WORDS)}"])
    return [said("system", secret), said("user", question), said("assistant", rng.choice(["yes", "no"]))]


def a_grade(rng: random.Random) -> Conversation:
    point = generate_one(rng)
    prompt = point.rubric_items[0].get_grader_prompt(
        [*point.convo, said("assistant", str(rng.randint(0, 200)))]
    )
    return [*prompt, said("assistant", f"<score>0.{rng.randint(0, 9)}</score>")]


def a_graded_answer(rng: random.Random) -> Conversation:
    return [*generate_one(rng).convo, said("assistant", str(rng.randint(0, 2000)))]


LONG_LESSONS: Sequence[Lesson] = (a_game, a_yes_or_no, a_language)
"""Of recipes whose prompts are so long that they are learned whole, by a model that knows nothing else."""

LESSONS: Sequence[Lesson] = (
    a_sum,
    a_problem,
    an_introduction,
    a_number,
    a_question,
    a_yes_or_no,
    a_grade,
    a_graded_answer,
)


def make_guesser(
    directory: Path,
    *,
    steps: int = 300,
    lessons: Sequence[Lesson] = LESSONS,
    shown: Sequence[int] = (48, 64, 64, 96, 352),
) -> Path:
    """Writes the model's directory and returns it; the same files come of it each time.

    Args:
        shown: how many of the last tokens of a lesson are learned from, drawn anew for each step. Mostly the
            end of a question is enough to tell what is asked, and costs a tenth.
    """
    make_tiny_model(
        directory, vocab=768, hidden=64, layers=2, heads=2, kv_heads=1, intermediate=128, context=CONTEXT
    )
    _make_tags_tokens(directory / "tokenizer.json")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    threads = torch.get_num_threads()
    # Its matrices are so small that threads would mostly wait for one another.
    torch.set_num_threads(1)
    try:
        _teach(model, directory, random.Random(1), steps, lessons, shown)
    finally:
        torch.set_num_threads(threads)
    model.save_pretrained(directory)
    return directory


def _make_tags_tokens(file: Path) -> None:
    """As in the real Qwen3, for renderers rely on it. The vocabulary has room: its text has few merges."""
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in ("<think>", "</think>")])
    tokenizer.save(str(file))


def _teach(
    model: PreTrainedModel,
    tokenizer: Path,
    rng: random.Random,
    steps: int,
    lessons: Sequence[Lesson],
    lengths: Sequence[int],
) -> None:
    by_name = [renderers.get_renderer(name, get_tokenizer(str(tokenizer))) for name in RENDERERS]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
    for _ in range(steps):
        rows = [rng.choice(by_name).build_supervised_example(lesson(rng)) for lesson in lessons]
        shown = rng.choice(lengths)
        ids = torch.zeros(len(rows), shown, dtype=torch.long)
        labels = torch.full((len(rows), shown), -100)
        for row, (chunks, weights) in enumerate(rows):
            tokens, taught = torch.tensor(chunks.to_ints()[-shown:]), weights[-shown:] > 0
            ids[row, : len(tokens)] = tokens
            labels[row, : len(tokens)] = torch.where(taught, tokens, -100)
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
