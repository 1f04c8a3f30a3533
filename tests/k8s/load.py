"""Runs in a pod: trains, publishes and samples until /tmp/stop is there, and prints a line of JSON for each.

Invariant: whatever the SDK raises is printed as an error and ends the process with status 1, so a failure is
never only a pause.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

os.environ["TINKER_API_KEY"] = os.environ["API_KEYS"].split()[0]

import tinker
from tinker import types

MODEL = os.environ["MODEL"]
TOKENS = list(range(20, 52))
STOP = Path("/tmp/stop")
STEPS_BETWEEN_PUBLISHES = 10


def tell(what: str, **more: Any) -> None:
    # One write, so that lines of two threads stay lines.
    os.write(1, (json.dumps({"what": what, "at": time.time(), **more}) + "\n").encode())


def datum() -> types.Datum:
    weights = [1.0] * (len(TOKENS) - 1)
    return types.Datum(
        model_input=types.ModelInput.from_ints(TOKENS[:-1]),
        loss_fn_inputs={"target_tokens": TOKENS[1:], "weights": weights},
    )


def loss_of(training: tinker.TrainingClient) -> float:
    return training.forward([datum()], "cross_entropy").result().metrics["loss:sum"]


def train(training: tinker.TrainingClient, published: list[tinker.SamplingClient]) -> None:
    steps = 0
    while not STOP.exists():
        passed = training.forward_backward([datum()], "cross_entropy")
        stepped = training.optim_step(types.AdamParams(learning_rate=1e-5))
        loss = passed.result().metrics["loss:sum"]
        stepped.result()
        steps += 1
        tell("step", number=steps, loss=loss)
        if steps % STEPS_BETWEEN_PUBLISHES == 0:
            published.append(training.save_weights_and_get_sampling_client().result())
            tell("publish", number=steps)
        time.sleep(0.2)


def sample(published: list[tinker.SamplingClient]) -> None:
    prompt = types.ModelInput.from_ints(TOKENS[:8])
    params = types.SamplingParams(max_tokens=4, temperature=0)
    while not STOP.exists():
        number = len(published)
        answer = published[number - 1].sample(prompt, num_samples=1, sampling_params=params).result()
        tell("sample", publish=number, tokens=list(answer.sequences[0].tokens))
        time.sleep(0.5)


def guarded(run: Any, *args: Any) -> None:
    try:
        run(*args)
    except BaseException as error:
        tell("error", error=f"{type(error).__name__}: {error}", trace=traceback.format_exc())
        os._exit(1)


def main() -> None:
    training = tinker.ServiceClient().create_lora_training_client(MODEL, rank=8).result()
    published = [training.save_weights_and_get_sampling_client().result()]
    threads = [
        threading.Thread(target=guarded, args=(train, training, published)),
        threading.Thread(target=guarded, args=(sample, published)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    path = training.save_state("kept").result().path
    tell("done", path=path, loss=loss_of(training))


def compare() -> None:
    """Loads a state that was saved before, and tells the loss that it has."""
    training = tinker.ServiceClient().create_training_client_from_state(os.environ["STATE"]).result()
    tell("loaded", loss=loss_of(training))


if __name__ == "__main__":
    guarded(compare if os.environ.get("STATE") else main)
    sys.exit(0)
