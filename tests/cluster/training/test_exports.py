"""Weights that leave the cluster: exports, their downloads, and what other libraries compute with them."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path

import peft
import pyrage
import pytest
import tinker
import torch
from tinker import types
from tinker_cookbook import weights
from transformers import AutoModelForCausalLM

from tests.cluster import batches
from tests.cluster.conftest import Cluster

ADAM = types.AdamParams(learning_rate=1e-2)
FILES = ["adapter_config.json", "adapter_model.safetensors"]


def train(client: tinker.TrainingClient, steps: int = 2) -> None:
    for seed in range(steps):
        client.forward_backward([batches.cross_entropy(seed, 20)], "cross_entropy")
        client.optim_step(ADAM).result()


def fetch(rest: tinker.RestClient, path: str, directory: Path) -> dict[str, str]:
    """Downloads an export as anybody can who has its URLs; the URLs."""
    urls = rest.get_external_weights_urls(path).result().urls
    for name, url in urls.items():
        with urllib.request.urlopen(url, timeout=120) as response:
            (directory / name).write_bytes(response.read())
    return urls


def logprobs(model: torch.nn.Module, datum: types.Datum) -> torch.Tensor:
    """Log-probabilities of a datum's targets by plain PyTorch."""
    with torch.no_grad():
        logits = model(torch.tensor([batches.inputs(datum)])).logits[0].float()
    targets = torch.tensor(batches.targets(datum))[:, None]
    return torch.log_softmax(logits, -1).gather(1, targets)[:, 0]


def test_peft_computes_with_an_export_what_the_trainer_computes(
    cluster: Cluster, training: tinker.TrainingClient, tmp_path: Path
) -> None:
    probe = batches.cross_entropy(77, 30)
    train(training)
    expected = batches.logprobs(training.forward([probe], "cross_entropy").result())[0]
    saved = training.save_weights_external("adapter")
    # What comes after it changes nothing about it.
    training.forward_backward([probe], "cross_entropy")
    training.optim_step(ADAM).result()
    path = saved.result().path
    assert path == f"tinker://{training.model_id}/external_weights/adapter"
    assert sorted(fetch(cluster.rest_client(), path, tmp_path)) == FILES
    base = AutoModelForCausalLM.from_pretrained(cluster.model_dir, dtype=torch.float32)
    assert not torch.allclose(logprobs(base, probe), expected, atol=1e-3)
    model = peft.PeftModel.from_pretrained(base, str(tmp_path))
    torch.testing.assert_close(logprobs(model, probe), expected, atol=1e-5, rtol=1e-5)


def test_an_export_is_what_samplers_load_from_the_store(
    cluster: Cluster, training: tinker.TrainingClient, tmp_path: Path
) -> None:
    train(training)
    training.save_weights_for_sampler("same").result()
    path = training.save_weights_external("same").result().path
    fetch(cluster.rest_client(), path, tmp_path)
    snapshot = cluster.snapshot(training.model_id)
    assert sorted(found.name for found in snapshot.iterdir()) == FILES
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (snapshot / name).read_bytes()


def test_every_file_of_an_encrypted_export_opens_for_each_recipient_only(
    cluster: Cluster, training: tinker.TrainingClient, tmp_path: Path
) -> None:
    recipients = [pyrage.x25519.Identity.generate() for _ in range(2)]
    public = [str(recipient.to_public()) for recipient in recipients]
    path = training.save_weights_external("secret", age_encryption_recipients=public).result().path
    assert sorted(fetch(cluster.rest_client(), path, tmp_path)) == [f"{name}.age" for name in FILES]
    for recipient in recipients:
        plain = pyrage.decrypt((tmp_path / "adapter_config.json.age").read_bytes(), [recipient])
        assert json.loads(plain)["r"] == 8
    with pytest.raises(pyrage.DecryptError):
        pyrage.decrypt(
            (tmp_path / "adapter_model.safetensors.age").read_bytes(), [pyrage.x25519.Identity.generate()]
        )
    with pytest.raises(tinker.RequestFailedError, match="recipients") as caught:
        training.save_weights_external("wrong", age_encryption_recipients=["age1nonsense"]).result()
    assert caught.value.category == types.RequestErrorCategory.User


def test_the_cookbook_downloads_training_weights_and_leaves_nothing_behind(
    cluster: Cluster, training: tinker.TrainingClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(training)
    path = training.save_state("final").result().path
    export = training.save_weights_external("plain").result().path
    monkeypatch.setenv("TINKER_API_KEY", cluster.api_key)
    weights.download(tinker_path=path, output_dir=str(tmp_path / "out"), base_url=cluster.base_url)
    (tmp_path / "expected").mkdir()
    fetch(cluster.rest_client(), export, tmp_path / "expected")
    assert sorted(found.name for found in (tmp_path / "out").iterdir()) == FILES
    for name in FILES:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "expected" / name).read_bytes()
    listed = cluster.rest_client().list_user_checkpoints(limit=1000).result().checkpoints
    assert not [one for one in listed if one.checkpoint_id == "external_weights/download"]


def test_a_deleted_export_is_not_served_any_more(
    cluster: Cluster, training: tinker.TrainingClient, tmp_path: Path
) -> None:
    rest = cluster.rest_client()
    path = training.save_weights_external("short", ttl_seconds=3600).result().path
    urls = fetch(rest, path, tmp_path)
    rest.delete_checkpoint_from_tinker_path(path).result()
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(urls[FILES[0]], timeout=120)
    assert training.save_weights_external("short").result().path == path
