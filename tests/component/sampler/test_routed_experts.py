"""The experts that a sampler tells of a sample's tokens are those that transformers' routers choose."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from services.common.process import rpc
from services.launcher.tiny_model import write_tokenizer
from tests.component.sampler.process import (
    CONTEXT,
    NEVER,
    RUNNER,
    VOCAB,
    Sampler,
    floats,
    ints,
    make_model,
    prompt,
    replica,
    request,
    sample,
    status,
    until_running,
)
from tests.component.sampler.test_moves import Told
from tests.component.sampler.test_preemption import preempted
from tests.reference import Reference, check_logprobs
from tests.unit.trainer.compute.architectures import config_of, random_model
from tinsmith.internal.v1 import sampler_pb2, sampler_pb2_grpc
from tinsmith.v1 import sampling_pb2

pytestmark = pytest.mark.heavy

EXPERTS, TOP_K, LAYERS = 300, 3, 2
OLD, NEW = 301, 302
SETTINGS = {
    **{"vocab_size": VOCAB, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1},
    **{"head_dim": 32, "max_position_embeddings": CONTEXT, "num_hidden_layers": 3},
    # More than a byte tells apart, and a layer between the two that does not route.
    **{"num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "moe_intermediate_size": 16},
    "mlp_only_layers": [1],
}


def made(directory: Path) -> Path:
    random_model(config_of("qwen3_moe", SETTINGS), "eager").save_pretrained(directory)
    write_tokenizer(directory, VOCAB, CONTEXT)
    return directory


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sampler]:
    """A sampler with keys and values for 800 tokens, that computes a long prompt in several steps."""
    directory = tmp_path_factory.mktemp("routed")
    options = ["--kv-cache-gib", "0.0008", "--max-context", "400", "--max-batched-tokens", "48"]
    if RUNNER == "v2":
        # It has vLLM tell those of all tokens; V1 on a CPU tells them unasked.
        options += ["--routed-experts", "yes"]
    with replica(directory, made(directory / "model"), *options) as started:
        yield started


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sampler]:
    directory = tmp_path_factory.mktemp("drafting")
    options = ("--speculative-ngram-tokens", "4", "--max-sequences", "16", "--routed-experts", "yes")
    with replica(directory, made(directory / "model"), *options) as started:
        yield started


def asking(tokens: list[int], **settings: object) -> sampler_pb2.SampleRequest:
    wanted = request(tokens, **settings)  # type: ignore[arg-type]
    wanted.routed_experts = True
    return wanted


def told(sequence: sampling_pb2.SampledSequence) -> np.ndarray:
    """Sorted, as those of a token have no order."""
    routed = sequence.routed_experts
    return np.sort(np.frombuffer(routed.ids, "<u2").reshape(routed.shape), axis=-1)


class Judge:
    """What transformers' routers choose of a sequence that the model reads at once."""

    def __init__(self, model_dir: Path) -> None:
        self.reference = Reference(model_dir)

    def experts(self, tokens: list[int]) -> np.ndarray:
        with torch.no_grad():
            logits = self.reference.model(torch.tensor([tokens]), output_router_logits=True).router_logits
        likely = torch.stack(list(logits), dim=1).float().log_softmax(-1).topk(TOP_K + 1)
        # Else it would be rounding that decides.
        self.nearest = float((likely.values[..., -2] - likely.values[..., -1]).min())
        return np.sort(likely.indices[..., :-1].numpy(), axis=-1)

    def check(self, wanted: sampler_pb2.SampleRequest, result: sampling_pb2.SampleResult) -> None:
        for sequence in result.sequences:
            read = (ints(wanted.prompt) + ints(sequence.tokens))[:-1]
            found, expected = told(sequence), self.experts(read)
            assert found.shape == (len(read), LAYERS, TOP_K)
            differ = (found != expected).any(-1)
            assert not differ.any() or (self.nearest < 1e-4 and differ.mean() < 0.01)
            logprobs = self.reference.sequence_logprobs([*read, ints(sequence.tokens)[-1]])
            check_logprobs(floats(sequence.logprobs), logprobs[len(ints(wanted.prompt)) - 1 :])


@pytest.fixture(scope="module")
def judge(small: Sampler) -> Judge:
    return Judge(small.model_dir)


async def test_they_are_of_the_prompt_and_of_all_sampled_tokens_but_the_last(
    small: Sampler, judge: Judge
) -> None:
    async with small.client() as stub:
        tokens = prompt(1, 130)
        before = await sample(stub, request(tokens, max_tokens=4))
        # What was computed for others tells nothing of its experts, so it is computed again, in three steps.
        wanted = asking(tokens, n=3, seed=4, max_tokens=20, scores=True)
        result = await sample(stub, wanted)
        after = await sample(stub, request(tokens, max_tokens=4))
    assert not any(sequence.HasField("routed_experts") for sequence in before.sequences)
    assert result.prompt_cache_hit_tokens == 0
    # It fills the cache for those who do not ask.
    assert after.prompt_cache_hit_tokens >= 112
    judge.check(wanted, result)


async def test_of_a_single_token_of_prompt_and_sequence_there_is_one(small: Sampler, judge: Judge) -> None:
    async with rpc.channel(small.address) as channel:
        wanted = asking([7], max_tokens=1)
        result = await sample(sampler_pb2_grpc.SamplerServiceStub(channel), wanted)
    assert told(result.sequences[0]).shape[0] == 1
    judge.check(wanted, result)


async def test_what_was_begun_again_beside_others_has_its_own(small: Sampler, judge: Judge) -> None:
    """More is asked for than there is memory for: vLLM gives sequences up and begins them again."""
    before = preempted(small)
    several = [
        asking(prompt(30 + index, 40 + index), seed=index, max_tokens=220, stop=NEVER) for index in range(5)
    ]
    others = [request(prompt(50 + index, 30), seed=index, max_tokens=60) for index in range(3)]
    async with small.client() as stub:
        together = await asyncio.gather(*(sample(stub, wanted) for wanted in several + others))
    assert preempted(small) > before
    for wanted, result in zip(several, together, strict=False):
        judge.check(wanted, result)
    for result in together[len(several) :]:
        assert not result.sequences[0].HasField("routed_experts")


async def test_a_stream_and_a_sample_that_is_kept_have_those_of_their_tokens(
    small: Sampler, judge: Judge
) -> None:
    async with small.client() as stub:
        wanted = asking(prompt(9, 60), max_tokens=300, stop=NEVER)
        answers = stub.StreamSample(sampler_pb2.StreamSampleRequest(sample=wanted), timeout=120)
        parts = []
        async for answer in answers:
            if answer.WhichOneof("kind") == "last":
                last = answer.last.result
                break
            parts += answer.new_tokens.sequences
            if sum(part.added.tokens.shape[0] for part in parts) > 20:
                await stub.EndSample(sampler_pb2.EndSampleRequest(request_id=wanted.request_id, keep=True))
        await until_running(stub, lambda running: running == 0)
    assert not any(part.added.HasField("routed_experts") for part in parts)
    (sequence,) = last.sequences
    assert sequence.stop_reason == sampling_pb2.STOP_REASON_CANCELLED
    assert 20 < sequence.tokens.shape[0] < 300
    judge.check(wanted, last)


async def test_after_updates_of_all_weights_under_generations_they_are_those_of_the_new_weights(
    small: Sampler,
) -> None:
    """One of which may be read in part then: it begins again, with the very next step."""
    for version in (OLD, NEW):
        small.store_full(version)
    async with small.client() as stub:
        moving = [
            request(prompt(60, length), OLD, seed=1, max_tokens=most, stop=NEVER)
            for length, most in ((20, 370), (300, 95))
        ]
        for wanted in moving:
            wanted.moves = wanted.keeps_kv = True
        running = [Told(stub, wanted) for wanted in moving]
        # The second's prompt takes seven steps, and this token is of one of the first.
        beside = asyncio.create_task(running[1].read(1))
        await running[0].read(1)
        for one in running:
            await one.move(NEW)
        await beside
        asked = asking(prompt(62, 60), version=NEW, seed=9, max_tokens=30)
        result, *moved = await asyncio.gather(sample(stub, asked), *(one.result() for one in running))
    for made in moved:
        (sequence,) = made.sequences
        assert sequence.versions[-1].version == NEW
        assert not sequence.HasField("routed_experts")
    judge = Judge(small.stored(NEW))
    judge.check(asked, result)


async def test_drafts_that_do_not_hold_leave_nothing_behind(drafting: Sampler, judge: Judge) -> None:
    tokens = prompt(3, 12) * 6
    wanted = asking(tokens, n=4, seed=1, max_tokens=80, stop=NEVER, temperature=0.7)
    async with rpc.channel(drafting.address) as channel:
        result = await sample(sampler_pb2_grpc.SamplerServiceStub(channel), wanted)
    judge.check(wanted, result)


async def test_workers_that_share_layers_tell_those_of_the_whole(tmp_path: Path) -> None:
    options = ("--tensor-parallel-size", "2", "--kv-cache-gib", "0.1", "--routed-experts", "yes")
    with replica(tmp_path, made(tmp_path / "model"), *options) as started:
        async with started.client() as stub:
            wanted = asking(prompt(4, 40), n=2, seed=2, max_tokens=12)
            result = await sample(stub, wanted)
    Judge(started.model_dir).check(wanted, result)


async def test_a_model_that_routes_nothing_has_none_to_tell(tmp_path: Path) -> None:
    with replica(tmp_path, make_model(tmp_path / "model", tied=True)) as started:
        async with started.client() as stub:
            response = await stub.Sample(asking(prompt(1, 8)))
            assert response.error.code == "routed_experts_not_supported"
            assert (await status(stub)).running == 0
