"""What a user of the tinker SDK does first, in words that every version of it understands.

Run with one version on PYTHONPATH: `python -m tests.sdks.steps BASE_URL API_KEY BASE_MODEL`. Prints a JSON
object: what came of each step, "works" or the error. What needs a step that failed is not tried.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import tinker
from tinker import types
from tinker._version import __version__

TOKENS = [5, 6, 7, 8, 9, 10, 11, 12]
ADAM = {"learning_rate": 1e-2}


def datum() -> types.Datum:
    inputs = {
        "target_tokens": types.TensorData(data=TOKENS[1:], dtype="int64", shape=[len(TOKENS) - 1]),
        "weights": types.TensorData(data=[1.0] * (len(TOKENS) - 1), dtype="float32", shape=[len(TOKENS) - 1]),
    }
    return types.Datum(model_input=types.ModelInput.from_ints(TOKENS[:-1]), loss_fn_inputs=inputs)


def made(client: Any) -> Any:
    """A client, of versions that make it at once and of those that promise it."""
    return client.result(120) if hasattr(client, "result") else client


class Steps:
    """The steps in their order."""

    def __init__(self, base_url: str, api_key: str, base_model: str) -> None:
        self._where = {"base_url": base_url, "api_key": api_key}
        self._base_model = base_model

    def session(self) -> None:
        self.service = tinker.ServiceClient(**self._where)

    def train(self) -> None:
        self.training = made(self.service.create_lora_training_client(base_model=self._base_model, rank=8))
        losses = []
        for _ in range(3):
            result = self.training.forward_backward([datum()], "cross_entropy").result(120)
            self.training.optim_step(types.AdamParams(**ADAM)).result(120)
            losses.append(-sum(result.loss_fn_outputs[0]["logprobs"].data))
        assert losses[2] < losses[1] < losses[0], losses

    def forward(self) -> None:
        before = self.training.forward([datum()], "cross_entropy").result(120)
        assert len(before.loss_fn_outputs[0]["logprobs"].data) == len(TOKENS) - 1

    def custom_loss(self) -> None:
        def loss(_: Any, logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
            return -sum(one.sum() for one in logprobs), {"seen": float(len(logprobs))}

        result = self.training.forward_backward_custom([datum()], loss).result(120)
        assert result.metrics["seen"] == 1.0
        self.training.optim_step(types.AdamParams(**ADAM)).result(120)

    def sample(self) -> None:
        path = self.training.save_weights_for_sampler("s").result(120).path
        sampler = made(self.service.create_sampling_client(model_path=path))
        params = types.SamplingParams(max_tokens=4, temperature=1.0)
        answer = sampler.sample(types.ModelInput.from_ints(TOKENS), 2, params).result(120)
        assert len(answer.sequences) == 2 and all(one.tokens for one in answer.sequences)
        scores = sampler.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result(120)
        assert len(scores) == len(TOKENS) and scores[1] < 0

    def save(self) -> None:
        self.path = self.training.save_state("a").result(120).path

    def resume(self) -> None:
        resumed = made(self.service.create_training_client_from_state_with_optimizer(self.path))
        # Of a forward_backward, because some versions have no forward here.
        results = [model.forward_backward([datum()], "cross_entropy") for model in (self.training, resumed)]
        ours, theirs = (result.result(120).loss_fn_outputs[0]["logprobs"].data for result in results)
        assert max(abs(one - other) for one, other in zip(ours, theirs, strict=True)) < 1e-4

    def lists(self) -> None:
        if hasattr(self.training, "save_weights_external"):
            # Versions that know exports see them; those that do not can still list.
            self.training.save_weights_external("e").result(120)
        rest = self.service.create_rest_client()
        found = rest.list_user_checkpoints().result(60).checkpoints
        assert self.path in [one.tinker_path for one in found]
        run = rest.get_training_run(self.path.split("/")[2]).result(60)
        assert run.base_model == self._base_model

    def all(self) -> list[Callable[[], None]]:
        return [
            *(self.session, self.train, self.forward, self.custom_loss),
            *(self.sample, self.save, self.resume, self.lists),
        ]


def main() -> None:
    warnings.simplefilter("ignore")
    told = {}
    for step in Steps(*sys.argv[1:]).all():
        if any(told.get(needed, "works") != "works" for needed in ("session", "train")):
            break
        try:
            step()
            told[step.__name__] = "works"
        except Exception as error:
            told[step.__name__] = f"{type(error).__name__}: {error}"
    print(json.dumps({"version": __version__, **told}), flush=True)
    # Of some versions threads are left that never end.
    os._exit(0)


if __name__ == "__main__":
    main()
