"""Data sets of the recipes, small and local, in the form that the hub has them in."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.ecosystem.recipes import write_data_set

RIGHT_DIGIT = "7"
"""What is right in the local gsm8k, whatever the question."""
_PLACES = ("Paris", "Rome", "Madrid", "Berlin", "London", "Vienna", "Warsaw", "Athens")


def write_all(directory: Path) -> None:
    """Writes every data set below `directory`, each at the hub's name, and files that recipes are given."""
    rng = random.Random(0)
    talks = [{"messages": _talk(rng)} for _ in range(400)]
    write_data_set(directory / "HuggingFaceH4/no_robots", train=talks[:384], test=talks[384:])
    write_lines(directory / "talks.jsonl", talks)
    problems = write_problems(directory, rng, train=20, test=8)
    answered = [
        [
            {"role": "user", "content": row["question"]},
            {"role": "assistant", "content": f"\\boxed{{{RIGHT_DIGIT}}}"},
        ]
        for row in problems
    ]
    write_lines(directory / "answers.jsonl", [{"messages": messages} for messages in answered])
    write_data_set(
        directory / "zwhe99/DeepMath-103K",
        train=[{"question": problem["question"], "final_answer": RIGHT_DIGIT} for problem in problems],
    )
    write_data_set(
        directory / "Anthropic/hh-rlhf",
        train=[_preference(rng) for _ in range(48)],
        test=[_preference(rng) for _ in range(8)],
    )
    thoughts = [
        {
            "conversations": [
                {"from": "human", "value": ask["content"]},
                {"from": "gpt", "value": answer["content"]},
            ]
        }
        for ask, answer in (_talk(rng) for _ in range(48))
    ]
    write_data_set(directory / "open-thoughts/OpenThoughts3-1.2M", train=thoughts)
    write_data_set(directory / "hicai-zju/SciKnowEval", test=[_multiple_choice(rng) for _ in range(24)])
    _write_markets(directory / "markets.csv", rng)


def write_problems(directory: Path, rng: random.Random, *, train: int, test: int) -> list[dict[str, str]]:
    """Writes so many problems in the place of gsm8k, and returns them."""
    problems = [
        {"question": f"How many tins are in {rng.randint(2, 99)} boxes?", "answer": f"#### {RIGHT_DIGIT}"}
        for _ in range(train + test)
    ]
    write_data_set(directory / "openai/gsm8k", "main", train=problems[:train], test=problems[train:])
    return problems


def write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes a file of JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _talk(rng: random.Random) -> list[dict[str, str]]:
    place = rng.choice(_PLACES)
    return [
        {"role": "user", "content": f"Where does the tinsmith of {place} live?"},
        {"role": "assistant", "content": f"The tinsmith of {place} lives in {place}."},
    ]


def _preference(rng: random.Random) -> dict[str, str]:
    asked = f"\n\nHuman: Where does the tinsmith of {rng.choice(_PLACES)} live?\n\nAssistant: "
    return {"chosen": asked + "In a small house.", "rejected": asked + "Nobody can know that."}


def _multiple_choice(rng: random.Random) -> dict[str, Any]:
    return {
        "question": f"What is made by the tinsmith of {rng.choice(_PLACES)}?",
        "choices": {"label": ["A", "B"], "text": ["tins", "bread"]},
        "answerKey": "A",
        "domain": "Chemistry",
        "type": "mcq-2-choices",
        "details": {"level": "L3"},
    }


def _write_markets(path: Path, rng: random.Random) -> None:
    """Markets that closed before the recipe's split date, for training, and later ones."""
    names = (
        "submission_id",
        "event_ticker",
        "title",
        "snapshot_time",
        "close_time",
        "market_outcome",
        "category",
        "markets",
        "sources",
    )
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        for number in range(24):
            month = "09" if number < 20 else "11"
            place = rng.choice(_PLACES)
            writer.writerow(
                {
                    "submission_id": f"s{number}",
                    "event_ticker": f"TIN{number}",
                    "title": f"Tin in {place}",
                    "snapshot_time": f"2025-{month}-01T00:00:00Z",
                    "close_time": f"2025-{month}-20T00:00:00Z",
                    "market_outcome": json.dumps({f"Tin in {place} gets dearer": 1}),
                    "category": "Economics",
                    "markets": json.dumps([f"Tin in {place} gets dearer"]),
                    "sources": json.dumps([{"title": "Tin", "summary": "Tin is sought.", "ranking": 1}]),
                }
            )
