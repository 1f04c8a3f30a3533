"""Clients: real SDK loops that go on until they are told to stop, and note all they ask for and get."""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import tinker
from tinker import types

from tests.cluster import batches
from tests.cluster.conftest import BASE_MODEL
from tests.robustness.history import Entry, History

Connect = Callable[[], tinker.ServiceClient]
RESULT_TIMEOUT_S = 600.0
LENGTHS = (40, 60)
"""Tokens of a datum. The clusters of this suite have micro-batches of 64: every datum is a micro-batch
of its own, so what a model computes does not depend on the other models, to the last bit."""
LEARNING_RATE = 1e-2
_PROMPT = 12
_PARAMETERS = (
    {"temperature": 0.0, "max_tokens": 8},
    {"temperature": 1.0, "max_tokens": 8, "seed": 2**40 + 7},
)
_PAUSE_S = 0.05
_NO_MEMORY = "out of device memory on one sequence"


class Client(threading.Thread):
    """One client. `failure` is what ended it before its time."""

    def __init__(self, connect: Connect, number: int) -> None:
        super().__init__(name=f"client-{number}", daemon=True)
        self.history = History(self.name)
        self.failure: BaseException | None = None
        self._connect = connect
        self._number = number
        self._random = random.Random(number)
        self._ending = threading.Event()

    def end(self) -> None:
        """Asks it to finish what it has begun and to stop."""
        self._ending.set()

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self.failure = error

    def _work(self) -> None:
        raise NotImplementedError

    def _create(self) -> tinker.TrainingClient:
        """A session of its own, and a model in it."""
        shape = {"rank": 4 + 4 * (self._number % 2), "seed": self._number}
        entry = self.history.ask("create", shape)
        started = _Now(lambda: self._connect().create_lora_training_client(BASE_MODEL, **shape))
        client: tinker.TrainingClient = self._finish(entry, started, _nothing)
        self.history.model_id = str(client.model_id)
        return client

    def _finish(self, entry: Entry, future: Any, summarise: Callable[[Any], dict[str, Any]]) -> Any:
        try:
            result = future.result(timeout=RESULT_TIMEOUT_S)
        except tinker.RequestFailedError as error:
            if entry.kind not in ("forward", "forward_backward") or _NO_MEMORY not in str(error):
                entry.error = f"{type(error).__name__}: {error}"
                raise
            # A script goes on without the batch.
            entry.refused, entry.result, entry.done = True, {}, time.monotonic()
            return None
        except BaseException as error:
            entry.error = f"{type(error).__name__}: {error}"
            raise
        entry.result = summarise(result)
        entry.done = time.monotonic()
        return result

    def _score(self, client: tinker.TrainingClient) -> None:
        """What the weights make of a sequence."""
        one = self._random.randrange(1 << 20), self._random.randint(*LENGTHS)
        entry = self.history.ask("forward", {"data": [one]})
        future = client.forward([batches.cross_entropy(*one)], "cross_entropy")
        self._finish(entry, future, _differentiated)

    def _differentiate(
        self, client: tinker.TrainingClient, datums: int
    ) -> tuple[Entry, Any, Callable[[Any], dict[str, Any]]]:
        data = [(self._random.randrange(1 << 20), self._random.randint(*LENGTHS)) for _ in range(datums)]
        entry = self.history.ask("forward_backward", {"data": data})
        future = client.forward_backward([batches.cross_entropy(*one) for one in data], "cross_entropy")
        return entry, future, _differentiated

    def _optimise(self, client: tinker.TrainingClient) -> tuple[Entry, Any, Callable[[Any], dict[str, Any]]]:
        entry = self.history.ask("step", {"learning_rate": LEARNING_RATE})
        return entry, client.optim_step(types.AdamParams(learning_rate=LEARNING_RATE)), _stepped

    def _sample(self, client: tinker.SamplingClient, source: str) -> None:
        """Samples greedily and with a seed, both at once."""
        prompt = self._random.randrange(4)
        pending = []
        for parameters in _PARAMETERS:
            entry = self.history.ask("sample", {"source": source, "prompt": prompt, **parameters})
            params = types.SamplingParams(stop=[], **parameters)
            ids = types.ModelInput.from_ints(batches.tokens(prompt, _PROMPT))
            pending.append((entry, client.sample(ids, 1, params)))
        for entry, future in pending:
            self._finish(entry, future, _sampled)


class Trainee(Client):
    """Trains: scores, gradients, steps, and now and then a save, a load, a snapshot to sample from.

    Args:
        datums: examples of one forward_backward; `accumulate`: forward_backwards of one step.
    """

    def __init__(self, connect: Connect, number: int, datums: int, accumulate: int) -> None:
        super().__init__(connect, number)
        self._datums = datums
        self._accumulate = accumulate
        self._snapshots: list[tuple[tinker.SamplingClient, str]] = []
        self._saved = ""

    def _work(self) -> None:
        client = self._create()
        step = 0
        while not self._ending.is_set():
            self._step(client)
            step += 1
            if step % 3 == 0:
                self._publish(client)
            if step % 5 == 0:
                self._save(client, f"step-{step}")
            if step % 8 == 0:
                self._load(client)
            time.sleep(_PAUSE_S)
        self._publish(client)

    def _step(self, client: tinker.TrainingClient) -> None:
        self._score(client)
        pending = [self._differentiate(client, self._datums) for _ in range(self._accumulate)]
        for one in [*pending, self._optimise(client)]:
            self._finish(*one)

    def _publish(self, client: tinker.TrainingClient) -> None:
        entry = self.history.ask("publish", {})
        source = f"{client.model_id}@{len(self.history.training) - 1}"
        sampler = self._finish(entry, _Now(client.save_weights_and_get_sampling_client), _nothing)
        self._snapshots = [*self._snapshots[-3:], (sampler, source)]
        self._sample(sampler, source)
        # One from before: it must not have changed.
        self._sample(*self._random.choice(self._snapshots))

    def _save(self, client: tinker.TrainingClient, name: str) -> None:
        entry = self.history.ask("save", {"name": name})
        self._saved = self._finish(entry, client.save_state(name), _nothing).path

    def _load(self, client: tinker.TrainingClient) -> None:
        entry = self.history.ask("load", {"name": self._saved.rpartition("/")[2]})
        self._finish(entry, client.load_state_with_optimizer(self._saved), _nothing)


class Reader(Client):
    """Samples from the base model without end."""

    def _work(self) -> None:
        client = self._connect().create_sampling_client(base_model=BASE_MODEL).result()
        while not self._ending.is_set():
            self._sample(client, BASE_MODEL)
            time.sleep(_PAUSE_S)


class Newcomer(Client):
    """A script that starts now, whatever is away: it trains one step and samples from the base model, in one
    order or the other, and ends."""

    def _work(self) -> None:
        works = [self._train, self._read]
        for work in works if self._number % 2 else reversed(works):
            work()

    def _train(self) -> None:
        client = self._create()
        for one in (self._differentiate(client, 1), self._optimise(client)):
            self._finish(*one)

    def _read(self) -> None:
        try:
            client = self._connect().create_sampling_client(base_model=BASE_MODEL).result()
        except BaseException as error:
            self.history.ask("sample", {"source": BASE_MODEL}).error = f"{type(error).__name__}: {error}"
            raise
        self._sample(client, BASE_MODEL)


class _Now:
    """A call of the SDK that returns a client, or a future of one, as a future."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call

    def result(self, timeout: float) -> Any:
        found = self._call()
        return found.result(timeout=timeout) if hasattr(found, "result") else found


def _nothing(_: Any) -> dict[str, Any]:
    return {}


def _differentiated(output: tinker.ForwardBackwardOutput) -> dict[str, Any]:
    digest = hashlib.sha256()
    for logprobs in batches.logprobs(output):
        digest.update(logprobs.numpy().tobytes())
    return {"loss": output.metrics["loss:sum"], "logprobs": digest.hexdigest()}


def _stepped(response: types.OptimStepResponse) -> dict[str, Any]:
    metrics = response.metrics or {}
    return {name: metrics[name] for name in ("grad_norm", "update_norm")}


def _sampled(response: types.SampleResponse) -> dict[str, Any]:
    (sequence,) = response.sequences
    return {"tokens": list(sequence.tokens), "logprobs": list(sequence.logprobs or [])}
