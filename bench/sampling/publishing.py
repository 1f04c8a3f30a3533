"""How soon new weights answer, and what publishing them costs those who sample meanwhile."""

from __future__ import annotations

import statistics
import threading
from typing import Any

import grpc
import numpy as np

from bench.rows import Row, alternate, milliseconds, ratio_row, seconds
from bench.sampling import raw_broadcast
from bench.sampling.throughput import sample
from bench.stack import BASE_MODEL, RANK, Stack, next_token_datum, random_tokens, train
from bench.training.exactness import newest_snapshot
from tinsmith.v1 import results_pb2, service_pb2_grpc

REPETITIONS, PROMPT_TOKENS = 9, 32
CROWD, CROWD_TOKENS, CROWD_REPETITIONS = 16, 64, 4
PUBLISH_EVERY_S = 1.0
RESULT_SECONDS = 60.0


def measure(stack: Stack) -> list[Row]:
    return [_first_token(stack), _beside_sampling(stack)]


def _first_token(stack: Stack) -> Row:
    """save_weights_and_get_sampling_client to the first sampled token, against the bytes' bare broadcast."""
    rng = np.random.default_rng(5)
    data = [next_token_datum(random_tokens(rng, stack.vocab, 1, 64)[0])]
    model = stack.new_model()
    published = []
    for _ in range(REPETITIONS + 2):
        train(model, data, 1e-4)
        prompts = random_tokens(rng, stack.vocab, 1, PROMPT_TOKENS)

        def publish(prompts: list[list[int]] = prompts) -> None:
            sample([model.save_weights_and_get_sampling_client().result()], prompts, 1)

        published.append(seconds(publish))
    saved = _last_save(stack, str(model.model_id))
    raw = raw_broadcast.seconds(saved.wire_bytes)
    return first_token_row(published[2:], raw, int(saved.wire_bytes), int(saved.receivers))


def first_token_row(published: list[float], raw: float, wire_bytes: int, receivers: int) -> Row:
    """What a publish takes beyond twice the broadcast."""
    return Row(
        "publishing: save to first token - 2 x raw broadcast, p50",
        1e3 * (statistics.median(published) - 2 * raw),
        "ms",
        at_most=150.0,
        details={
            "save_to_first_token_ms": milliseconds(published),
            "raw_broadcast_ms": milliseconds([raw]),
            "wire_bytes": wire_bytes,
            "receivers": receivers,
            "lora_rank": RANK,
            "repetitions": len(published),
        },
    )


def _beside_sampling(stack: Stack) -> Row:
    """A crowd samples the base model, with another tenant publishing and without."""
    rng = np.random.default_rng(9)
    model = stack.new_model()
    train(model, [next_token_datum(random_tokens(rng, stack.vocab, 1, 64)[0])], 1e-4)
    crowd = stack.service.create_sampling_client(base_model=BASE_MODEL).result()
    count = 0

    def work() -> None:
        sample([crowd], random_tokens(rng, stack.vocab, CROWD, PROMPT_TOKENS), CROWD_TOKENS)

    def disturbed(_: int) -> float:
        nonlocal count
        done = threading.Event()

        def publish() -> None:
            nonlocal count
            while not done.is_set():
                model.save_weights_and_get_sampling_client().result()
                count += 1
                done.wait(PUBLISH_EVERY_S)

        publisher = threading.Thread(target=publish)
        publisher.start()
        try:
            return seconds(work)
        finally:
            done.set()
            publisher.join()

    sides = (disturbed, lambda _: seconds(work))
    alternate(1, *sides)
    beside, alone = alternate(CROWD_REPETITIONS, *sides)
    name = f"sampling beside a publish every {PUBLISH_EVERY_S:g} s / undisturbed"
    row = ratio_row(name, beside, alone, CROWD * CROWD_TOKENS, at_least=0.9)
    row.details["publishes"] = count
    return row


def _last_save(stack: Stack, model_id: str) -> Any:
    """What the newest save came to; the SDK drops these figures, the gRPC service has them."""
    version = newest_snapshot(stack.data_dir, model_id).name
    request = results_pb2.GetResultRequest(request_id=f"{model_id}:{version}", timeout_seconds=RESULT_SECONDS)
    with grpc.insecure_channel(stack.grpc_address) as channel:
        service = service_pb2_grpc.TinsmithServiceStub(channel)
        answer = service.GetResult(
            request, timeout=RESULT_SECONDS + 5, metadata=(("x-api-key", stack.api_key),)
        )
    return answer.result.save_for_sampler
