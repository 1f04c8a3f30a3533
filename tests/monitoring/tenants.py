"""What tenants do with a cluster for some minutes, each in a thread of its own with its own API key."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable

import grpc
import tinker
from tinker import types

from tests.cluster import batches
from tests.cluster.conftest import BASE_MODEL, Cluster
from tests.cluster.sampling.test_moves import Rollouts
from tinsmith.v1 import service_pb2_grpc

log = logging.getLogger(__name__)

STEP = types.AdamParams(learning_rate=1e-3)
WAIT_S = 300


def key_of(cluster: Cluster, owner: str) -> str:
    """A new API key."""
    command = [sys.executable, "-m", "services.launcher.cli", "keys", "create", owner]
    command += ["--data-dir", str(cluster.data_dir)]
    made = subprocess.run(command, capture_output=True, text=True, check=True, timeout=WAIT_S)
    return made.stdout.split()[0]


class Tenants:
    """Tenants that work until they are to end.

    Attributes:
        failures: what ended one of them, which nothing should.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        self.failures: list[Exception] = []

    def start(self) -> None:
        """Starts all of them."""
        for work in (self._supervised, self._reinforcement, self._rollouts, self._evaluation, self._stranger):
            thread = threading.Thread(
                target=self._unless_it_fails, args=(work,), name=work.__name__, daemon=True
            )
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """Has them end what they do, and waits for it."""
        self._over.set()
        for thread in self._threads:
            thread.join(WAIT_S)

    def _unless_it_fails(self, work: Callable[[str], None]) -> None:
        try:
            work(key_of(self._cluster, work.__name__.strip("_")))
        except Exception as error:
            log.exception("%s ended", work.__name__)
            self.failures.append(error)

    def _supervised(self, key: str) -> None:
        """Trains on batches of 16 examples, and saves its state now and then."""
        training = self._cluster.service_client(key).create_lora_training_client(BASE_MODEL, rank=16)
        steps = 0
        while not self._over.is_set():
            batch = [batches.cross_entropy(16 * steps + index, 48 + 8 * index) for index in range(16)]
            training.forward_backward(batch, "cross_entropy")
            training.optim_step(STEP).result(timeout=WAIT_S)
            steps += 1
            if steps % 40 == 0:
                training.save_state(f"step-{steps}").result(timeout=WAIT_S)
            time.sleep(0.2)

    def _reinforcement(self, key: str) -> None:
        """Trains on its own samples, one step behind: they are generated while it trains."""
        training = self._cluster.service_client(key).create_lora_training_client(BASE_MODEL, rank=8)
        params = types.SamplingParams(max_tokens=96, temperature=1.0)
        prompts = [types.ModelInput.from_ints(batches.tokens(index, 40)) for index in range(4)]
        sampler = training.save_weights_and_get_sampling_client()
        asked = [sampler.sample(prompt, 4, params) for prompt in prompts]
        while not self._over.is_set():
            before, sampler = asked, training.save_weights_and_get_sampling_client()
            asked = [sampler.sample(prompt, 4, params) for prompt in prompts]
            batch = []
            for seed, future in enumerate(before):
                for sequence in future.result(timeout=WAIT_S).sequences:
                    length, logprobs = len(sequence.tokens), sequence.logprobs or []
                    batch.append(batches.policy(seed, length, logprobs, [1.0] * length))
            training.forward_backward(batch, "importance_sampling")
            training.optim_step(STEP).result(timeout=WAIT_S)

    def _rollouts(self, key: str) -> None:
        """Long rollouts over gRPC that go on with every save of their model."""
        while not self._over.is_set():
            with grpc.insecure_channel(f"127.0.0.1:{self._cluster.grpc_port}") as channel:
                try:
                    self._roll(Rollouts(service_pb2_grpc.TinsmithServiceStub(channel), key))
                except grpc.RpcError:
                    # Its gateway went away. Begun anew at another one.
                    self._over.wait(1)

    def _roll(self, rollouts: Rollouts) -> None:
        rollouts.train()
        _, session = rollouts.save()
        while not self._over.is_set():
            request = rollouts.request(session)
            # As long as a save takes where cores are shared; to the end of the context could take minutes.
            request.params.max_tokens = 192
            parts = rollouts.stream(request)
            next(parts)
            rollouts.save()
            rollouts.train()
            for _ in parts:
                pass
            self._over.wait(2)

    def _evaluation(self, key: str) -> None:
        """Scores prompts and samples the base model, in bursts."""
        sampler = self._cluster.service_client(key).create_sampling_client(base_model=BASE_MODEL)
        shared = batches.tokens(1, 288)
        number = 0
        while not self._over.is_set():
            number += 1
            prompts = [
                types.ModelInput.from_ints(shared + batches.tokens(number + index, 16)) for index in range(8)
            ]
            params = types.SamplingParams(max_tokens=32, temperature=0.0)
            asked = [sampler.sample(prompt, 2, params) for prompt in prompts]
            scored = [sampler.compute_logprobs(prompt) for prompt in prompts]
            for future in [*asked, *scored]:
                future.result(timeout=WAIT_S)
            self._over.wait(5)

    def _stranger(self, key: str) -> None:
        """Comes with a key that nobody gave out."""
        while not self._over.wait(15):
            request = urllib.request.Request(
                f"{self._cluster.base_url}/api/v1/create_session",
                data=json.dumps({"tags": [], "sdk_version": "0"}).encode(),
                headers={"x-api-key": f"{key[:-4]}none", "content-type": "application/json"},
            )
            try:
                urllib.request.urlopen(request, timeout=30).close()
            except urllib.error.HTTPError:
                continue
            except OSError:
                # The gateway that had the connection went away.
                continue


def closed(clients: list[tinker.ServiceClient]) -> None:
    """Ends the sessions of these clients."""
    for client in clients:
        client.close("success")
