"""Every score that a sample can be asked for, through the SDK, against the float32 reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import tinker
import torch
from tinker import types

from tests.cluster import batches
from tests.cluster.conftest import BASE_MODEL, CONTEXT, VOCAB, Cluster
from tests.reference import Reference

TOLERANCE = 1e-4
ONE = types.SamplingParams(max_tokens=1, temperature=0.0)


@dataclass
class Weights:
    """A sampling client and the independent model of the weights it answers from."""

    client: tinker.SamplingClient
    reference: Reference

    def rows(self, tokens: Sequence[int]) -> torch.Tensor:
        """Log-probabilities of every token at prompt positions 1, 2 ..., float32 [N - 1, vocab]."""
        with torch.no_grad():
            return self.reference.distribution(tokens)[:-1]


@pytest.fixture(scope="module")
def weights(cluster: Cluster) -> list[Weights]:
    """The base model and two adapters, one of them of the tied output head too."""
    service = cluster.service_client()
    base = service.create_sampling_client(base_model=BASE_MODEL).result()
    found = [Weights(base, Reference(cluster.model_dir))]
    for seed, rank in ((1, 8), (2, 4)):
        training = service.create_lora_training_client(
            BASE_MODEL, rank=rank, seed=seed, train_unembed=seed == 1
        ).result()
        for step in range(2):
            training.forward_backward([batches.cross_entropy(10 * seed + step, 40)], "cross_entropy")
            training.optim_step(types.AdamParams(learning_rate=5e-2)).result()
        client = training.save_weights_and_get_sampling_client().result()
        found.append(Weights(client, Reference(cluster.model_dir, cluster.snapshot(training.model_id))))
    return found


def model_input(tokens: Sequence[int]) -> types.ModelInput:
    return types.ModelInput.from_ints(list(tokens))


def random_ids(seed: int, rows: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (rows, columns), generator=generator)


def is_close(found: object, expected: object) -> None:
    np.testing.assert_allclose(found, expected, atol=TOLERANCE, rtol=0)


def test_the_most_likely_sampled_tokens_are_the_references_whatever_others_ask_for(
    weights: list[Weights],
) -> None:
    params = types.SamplingParams(max_tokens=12, temperature=1.0, seed=3, stop=[])
    jobs = []
    for index, (k, owner) in enumerate([(k, owner) for k in (5, 0, 2) for owner in weights]):
        tokens = batches.tokens(index, 9 + index)
        future = owner.client.sample(model_input(tokens), 2, params, topk_sample_logprobs=k)
        jobs.append((k, owner, tokens, future))
    for k, owner, tokens, future in jobs:
        for sequence in future.result().sequences:
            rows = owner.rows(tokens + sequence.tokens)[len(tokens) - 1 :]
            is_close(sequence.logprobs, rows.gather(1, torch.tensor(sequence.tokens)[:, None])[:, 0])
            if k == 0:
                assert sequence.topk_logprobs is None
                continue
            found = sequence.topk_logprobs_np
            assert found is not None and found.token_ids.shape == (12, k)
            is_close(found.logprobs, rows.topk(k).values)
            is_close(rows.gather(1, torch.from_numpy(found.token_ids).long()), found.logprobs)


def test_chosen_tokens_are_scored_exactly_wherever_they_rank(weights: list[Weights]) -> None:
    tokens = batches.tokens(5, 30)
    ids = random_ids(5, 29, 6)
    ids[::3] = -1
    ids[4, 2:] = -1
    ids[7, 0] = int(weights[0].rows(tokens)[7].argmin())
    dense = types.TensorData.from_torch(ids)
    futures = [w.client.sample(model_input(tokens), 1, ONE, target_prompt_logprobs=dense) for w in weights]
    for owner, future in zip(weights, futures, strict=True):
        response = future.result()
        found = response.target_prompt_logprobs
        assert found is not None and (found.dtype, found.shape) == ("float32", [29, 6])
        expected = owner.rows(tokens).gather(1, ids.clamp(min=0)).masked_fill(ids < 0, 0.0)
        is_close(found.to_numpy(), expected)
        assert response.prompt_logprobs is None and response.prompt_alt_tokens is None


def test_sparse_targets_come_back_sparse(weights: list[Weights]) -> None:
    tokens = batches.tokens(6, 40)
    ids = torch.full((39, 50), -1, dtype=torch.int64)
    ids[38] = random_ids(6, 1, 50)
    ids[3, 7] = 11
    sparse = types.TensorData.from_torch_sparse(ids, pad_value=-1)
    assert sparse.sparse_crow_indices is not None
    for owner in weights:
        future = owner.client.sample(model_input(tokens), 1, ONE, target_prompt_logprobs=sparse)
        found = future.result().target_prompt_logprobs
        assert found is not None
        assert found.sparse_crow_indices == sparse.sparse_crow_indices
        assert found.sparse_col_indices == sparse.sparse_col_indices
        rows = owner.rows(tokens)
        expected = rows.gather(1, ids.clamp(min=0)).masked_fill(ids < 0, 0.0)
        is_close(found.to_torch(), expected)


def test_draws_follow_the_models_distribution_at_the_requests_temperature(weights: list[Weights]) -> None:
    tokens = batches.tokens(7, 200)
    params = types.SamplingParams(max_tokens=1, temperature=0.5, seed=2**64 - 1)
    for owner in weights[:2]:
        future = owner.client.sample(model_input(tokens), 1, params, prompt_alt_tokens_k=64)
        drawn = future.result().prompt_alt_tokens
        assert drawn is not None and drawn.tokens.shape == [199, 64]
        ids = drawn.tokens.to_torch()
        rows = owner.rows(tokens)
        is_close(drawn.logprobs.to_torch(), rows.gather(1, ids))
        # The mean log-probability of 12736 draws, against its expectation and standard error.
        probabilities = (rows / 0.5).softmax(-1)
        mean = (probabilities * rows).sum(-1)
        variance = (probabilities * rows.square()).sum(-1) - mean.square()
        error = rows.gather(1, ids).mean(1).sub(mean).sum() / (variance / 64).sum().sqrt()
        assert abs(float(error)) < 5, error
        assert all(len(set(row)) > 8 for row in ids.tolist())


def test_draws_repeat_with_the_seed_and_only_with_it(weights: list[Weights]) -> None:
    tokens = batches.tokens(8, 20)

    def draw(seed: int | None, temperature: float = 1.0) -> list[list[int]]:
        params = types.SamplingParams(max_tokens=1, temperature=temperature, seed=seed)
        response = weights[1].client.sample(model_input(tokens), 1, params, prompt_alt_tokens_k=3).result()
        assert response.prompt_alt_tokens is not None
        return response.prompt_alt_tokens.tokens.tolist()

    assert draw(7) == draw(7)
    assert draw(7) != draw(8)
    assert draw(None) != draw(None)
    likely = weights[1].rows(tokens).argmax(-1, keepdim=True).expand(-1, 3)
    assert draw(7, temperature=0.0) == likely.tolist()


def test_only_the_last_positions_are_scored_when_that_is_asked(weights: list[Weights]) -> None:
    tokens = batches.tokens(9, 64)
    ids = random_ids(9, 63, 1)
    for owner, last_n in zip(weights, (1, 10, 63), strict=True):
        response = owner.client.sample(
            model_input(tokens),
            2,
            ONE,
            include_prompt_logprobs=True,
            topk_prompt_logprobs=4,
            target_prompt_logprobs=types.TensorData.from_torch(ids),
            prompt_alt_tokens_k=2,
            prompt_logprobs_last_n=last_n,
        ).result()
        rows = owner.rows(tokens)
        assert response.prompt_logprobs is not None and response.topk_prompt_logprobs is not None
        assert response.prompt_logprobs[:-last_n] == [None] * (64 - last_n)
        assert response.topk_prompt_logprobs[:-last_n] == [None] * (64 - last_n)
        own = rows.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        is_close(response.prompt_logprobs[-last_n:], own[-last_n:])
        topk = [[logprob for _, logprob in row or []] for row in response.topk_prompt_logprobs[-last_n:]]
        is_close(topk, rows[-last_n:].topk(4).values)
        # Targets and draws are of all positions.
        assert response.target_prompt_logprobs is not None and response.prompt_alt_tokens is not None
        is_close(response.target_prompt_logprobs.to_numpy(), rows.gather(1, ids))
        drawn = response.prompt_alt_tokens
        is_close(drawn.logprobs.to_torch(), rows.gather(1, drawn.tokens.to_torch()))


def test_prompts_prefilled_in_chunks_beside_running_generations_are_scored_right(
    weights: list[Weights],
) -> None:
    """Twelve prompts of nearly the whole context: more than one engine step can prefill."""
    running = [
        owner.client.sample(
            model_input(batches.tokens(20, 10)), 4, types.SamplingParams(max_tokens=100, stop=[], seed=1)
        )
        for owner in weights
    ]
    jobs = []
    for index in range(12):
        owner, tokens = weights[index % 3], batches.tokens(30 + index, CONTEXT - 1 - index)
        ids = random_ids(index, len(tokens) - 1, 2)
        future = owner.client.sample(
            model_input(tokens),
            1,
            ONE,
            include_prompt_logprobs=True,
            topk_prompt_logprobs=index % 4,
            target_prompt_logprobs=types.TensorData.from_torch(ids),
            prompt_alt_tokens_k=1,
        )
        jobs.append((owner, tokens, ids, future))
    for owner, tokens, ids, future in jobs:
        response, rows = future.result(), owner.rows(tokens)
        assert response.prompt_logprobs is not None and response.target_prompt_logprobs is not None
        is_close(response.prompt_logprobs[1:], rows.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0])
        is_close(response.target_prompt_logprobs.to_numpy(), rows.gather(1, ids))
        assert response.prompt_alt_tokens is not None
        drawn = response.prompt_alt_tokens
        is_close(drawn.logprobs.to_torch(), rows.gather(1, drawn.tokens.to_torch()))
    for owner, future in zip(weights, running, strict=True):
        for sequence in future.result().sequences:
            whole = batches.tokens(20, 10) + sequence.tokens
            is_close(sequence.logprobs, owner.reference.sequence_logprobs(whole)[9:])


def test_a_cached_prompt_is_still_scored_whole_and_its_hits_are_told(weights: list[Weights]) -> None:
    tokens = batches.tokens(70, 300)
    for owner in weights[:2]:
        hits = [
            owner.client.sample(model_input(tokens), 1, ONE).result().prompt_cache_hit_tokens
            for _ in range(2)
        ]
        assert hits[0] == 0 and 128 <= hits[1] < 300
        scored = owner.client.sample(model_input(tokens), 1, ONE, include_prompt_logprobs=True).result()
        assert scored.prompt_cache_hit_tokens == 0
        assert scored.prompt_logprobs is not None
        is_close(scored.prompt_logprobs[1:], owner.reference.sequence_logprobs(tokens))


def test_what_precedes_the_scored_positions_may_come_from_the_cache(weights: list[Weights]) -> None:
    tokens = batches.tokens(71, 300)
    late = torch.full((299, 4), -1, dtype=torch.int64)
    late[290] = random_ids(1, 1, 4)
    early = late.clone()
    early[10, 0] = 5
    for owner in weights[:2]:
        hits = owner.client.sample(model_input(tokens), 1, ONE).result().prompt_cache_hit_tokens
        assert hits == 0
        rows = owner.rows(tokens)
        # A number of last positions, and whether everything before them is long enough to be cached.
        for last_n, cached in ((20, True), (43, True), (44, True), (290, False)):
            response = owner.client.sample(
                model_input(tokens), 1, ONE, include_prompt_logprobs=True, prompt_logprobs_last_n=last_n
            ).result()
            assert (response.prompt_cache_hit_tokens > 0) == cached, last_n
            assert response.prompt_cache_hit_tokens <= 299 - last_n
            assert response.prompt_logprobs is not None
            own = rows.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
            is_close(response.prompt_logprobs[-last_n:], own[-last_n:])
        for ids, cached in ((late, True), (early, False)):
            response = owner.client.sample(
                model_input(tokens),
                1,
                ONE,
                target_prompt_logprobs=types.TensorData.from_torch_sparse(ids, pad_value=-1),
            ).result()
            assert (response.prompt_cache_hit_tokens > 0) == cached
            expected = rows.gather(1, ids.clamp(min=0)).masked_fill(ids < 0, 0.0)
            assert response.target_prompt_logprobs is not None
            is_close(response.target_prompt_logprobs.to_numpy(), expected)


def test_a_prompt_of_one_token_has_nothing_to_score(weights: list[Weights]) -> None:
    response = (
        weights[0]
        .client.sample(model_input([5]), 1, ONE, include_prompt_logprobs=True, prompt_alt_tokens_k=2)
        .result()
    )
    assert response.prompt_logprobs == [None]
    assert response.prompt_alt_tokens is not None and response.prompt_alt_tokens.tokens.shape == [0, 2]
