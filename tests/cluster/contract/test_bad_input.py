"""A wrong request fails as the user's mistake, says what to change, and damages nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tinker
import torch
from tinker import types

from tests.cluster import batches
from tests.cluster.conftest import BASE_MODEL, CONTEXT, VOCAB, Cluster


def datum(tokens: list[int], **fields: torch.Tensor) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens),
        loss_fn_inputs={name: types.TensorData.from_torch(value) for name, value in fields.items()},
    )


ONES = torch.ones(4)
IDS = torch.tensor([1, 2, 3, 4])
LONG = CONTEXT + 1

WRONG: dict[str, tuple[types.Datum, str, str]] = {
    "a token id beyond the vocabulary": (
        datum([1, 2, 3, VOCAB], target_tokens=IDS, weights=ONES),
        "cross_entropy",
        "vocab",
    ),
    "a negative token id": (datum([1, 2, 3, -1], target_tokens=IDS, weights=ONES), "cross_entropy", "vocab"),
    "a target beyond the vocabulary": (
        datum([1, 2, 3, 4], target_tokens=torch.tensor([1, 2, 3, VOCAB]), weights=ONES),
        "cross_entropy",
        "target_tokens",
    ),
    "targets of another length": (
        datum([1, 2, 3], target_tokens=IDS, weights=ONES),
        "cross_entropy",
        "target_tokens",
    ),
    "weights of another length": (
        datum([1, 2, 3, 4], target_tokens=IDS, weights=torch.ones(3)),
        "cross_entropy",
        "weights",
    ),
    "targets that are between integers": (
        datum([1, 2, 3, 4], target_tokens=ONES * 1.5, weights=ONES),
        "cross_entropy",
        "int64",
    ),
    "weights that are integers which float32 does not have": (
        datum([1, 2, 3, 4], target_tokens=IDS, weights=IDS + 2**24),
        "cross_entropy",
        "float32",
    ),
    "weights that are not finite": (
        datum([1, 2, 3, 4], target_tokens=IDS, weights=torch.tensor([1.0, float("nan"), 1.0, 1.0])),
        "cross_entropy",
        "finite",
    ),
    "no targets": (datum([1, 2, 3, 4], weights=ONES), "cross_entropy", "target_tokens"),
    "no sampling logprobs": (
        datum([1, 2, 3, 4], target_tokens=IDS, advantages=ONES),
        "importance_sampling",
        "logprobs",
    ),
    "no advantages": (
        datum([1, 2, 3, 4], target_tokens=IDS, logprobs=ONES),
        "importance_sampling",
        "advantages",
    ),
    "no tokens": (
        datum([], target_tokens=torch.zeros(0, dtype=torch.int64), weights=torch.zeros(0)),
        "cross_entropy",
        "token",
    ),
    "more tokens than the context": (
        datum([1] * LONG, target_tokens=torch.ones(LONG, dtype=torch.int64), weights=torch.ones(LONG)),
        "cross_entropy",
        "context",
    ),
    "a loss that is not known": (
        datum([1, 2, 3, 4], target_tokens=IDS, weights=ONES),
        "squared",
        "cross_entropy",
    ),
    "a loss whose formula is not public": (
        datum([1, 2, 3, 4], target_tokens=IDS, weights=ONES),
        "stable_reinforce",
        "importance_sampling",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_batch_fails_its_own_future_and_training_goes_on(
    training: tinker.TrainingClient, name: str
) -> None:
    wrong, loss, hint = WRONG[name]
    good = [batches.cross_entropy(0, 16)]
    before = training.forward(good, "cross_entropy").result().metrics["loss:sum"]
    with pytest.raises(tinker.RequestFailedError, match=hint) as caught:
        training.forward_backward([wrong], loss).result()  # type: ignore[arg-type]
    assert caught.value.category == types.RequestErrorCategory.User
    metrics = training.optim_step(types.AdamParams(learning_rate=0.1)).result().metrics
    assert metrics is not None and metrics["skipped"] == 1
    assert training.forward(good, "cross_entropy").result().metrics["loss:sum"] == before


def test_one_wrong_datum_refuses_the_whole_request(training: tinker.TrainingClient) -> None:
    good = batches.cross_entropy(0, 16)
    wrong = WRONG["a token id beyond the vocabulary"][0]
    with pytest.raises(tinker.RequestFailedError, match="1"):
        training.forward_backward([good, wrong], "cross_entropy").result()
    metrics = training.optim_step(types.AdamParams()).result().metrics
    assert metrics is not None and metrics["skipped"] == 1


def test_an_unknown_setting_of_a_loss_is_refused(training: tinker.TrainingClient) -> None:
    with pytest.raises(tinker.RequestFailedError, match="temperature"):
        training.forward_backward(
            [batches.cross_entropy(0, 8)], "cross_entropy", loss_fn_config={"temperature": 2.0}
        ).result()


@pytest.mark.parametrize(
    "adam",
    [
        types.AdamParams(learning_rate=-1.0),
        types.AdamParams(beta1=1.0),
        types.AdamParams(beta2=-0.1),
        types.AdamParams(eps=-1.0),
        types.AdamParams(weight_decay=-1.0),
        types.AdamParams(grad_clip_norm=float("inf")),
        types.AdamParams(learning_rate=float("inf")),
    ],
    ids=["learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm", "infinite"],
)
def test_an_optimizer_field_out_of_range_is_refused(
    training: tinker.TrainingClient, adam: types.AdamParams
) -> None:
    with pytest.raises(tinker.RequestFailedError) as caught:
        training.optim_step(adam).result()
    assert caught.value.category == types.RequestErrorCategory.User


def test_a_base_model_that_is_not_served_is_refused_with_the_ones_that_are(
    service: tinker.ServiceClient,
) -> None:
    with pytest.raises(tinker.BadRequestError, match=BASE_MODEL):
        service.create_lora_training_client("nobody/nothing").result()
    with pytest.raises(tinker.BadRequestError, match=BASE_MODEL):
        service.create_sampling_client(base_model="nobody/nothing").result()


@pytest.mark.parametrize("rank", [-1, 100_000])
def test_a_rank_out_of_range_is_refused(service: tinker.ServiceClient, rank: int) -> None:
    with pytest.raises((tinker.APIStatusError, tinker.RequestFailedError), match="rank"):
        service.create_lora_training_client(BASE_MODEL, rank=rank).result()


def test_a_key_that_is_not_known_opens_nothing(cluster: Cluster) -> None:
    with pytest.raises(tinker.AuthenticationError):
        tinker.ServiceClient(base_url=cluster.base_url, api_key="tml-wrong").get_server_capabilities()


SAMPLING: dict[str, Callable[[tinker.SamplingClient], object]] = {
    "vocab": lambda c: c.sample(types.ModelInput.from_ints([VOCAB]), 1, types.SamplingParams(max_tokens=1)),
    "context": lambda c: c.sample(
        types.ModelInput.from_ints([1] * LONG), 1, types.SamplingParams(max_tokens=1)
    ),
    "prompt": lambda c: c.sample(types.ModelInput.from_ints([]), 1, types.SamplingParams(max_tokens=1)),
    "max_tokens": lambda c: c.sample(types.ModelInput.from_ints([1]), 1, types.SamplingParams(max_tokens=0)),
    "temperature": lambda c: c.sample(
        types.ModelInput.from_ints([1]), 1, types.SamplingParams(temperature=-1.0)
    ),
    "top_p": lambda c: c.sample(types.ModelInput.from_ints([1]), 1, types.SamplingParams(top_p=0.0)),
    "top_k": lambda c: c.sample(types.ModelInput.from_ints([1]), 1, types.SamplingParams(top_k=-2)),
    "num_samples": lambda c: c.sample(types.ModelInput.from_ints([1]), 0, types.SamplingParams(max_tokens=1)),
}


@pytest.mark.parametrize("field", SAMPLING)
def test_a_wrong_sample_request_names_the_field(service: tinker.ServiceClient, field: str) -> None:
    client = service.create_sampling_client(base_model=BASE_MODEL).result()
    with pytest.raises((tinker.APIStatusError, tinker.RequestFailedError), match=field):
        SAMPLING[field](client).result()  # type: ignore[attr-defined]


def test_an_image_is_refused(service: tinker.ServiceClient) -> None:
    client = service.create_sampling_client(base_model=BASE_MODEL).result()
    image = types.ImageChunk(data=b"\x89PNG", format="png", expected_tokens=4)
    with pytest.raises((tinker.APIStatusError, tinker.RequestFailedError), match="image"):
        client.sample(types.ModelInput(chunks=[image]), 1, types.SamplingParams(max_tokens=1)).result()
