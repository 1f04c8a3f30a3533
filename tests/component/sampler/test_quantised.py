"""A sampler of a model whose files are quantised: int8 weights and inputs, as compressed-tensors has them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.common.state import registry
from services.common.state.redis_client import connect
from tests.component.sampler.process import (
    Sampler,
    floats,
    ints,
    make_full,
    make_model,
    prompt,
    replica,
    request,
    sample,
    write_full,
)
from tests.reference import Reference
from tinsmith.v1 import types_pb2

pytestmark = [pytest.mark.heavy, pytest.mark.long]

ADAPTER, FULL = 1, 2
ROUNDING = 0.1
"""Nats that int8 inputs cost. How a kernel rounds them is its own affair."""


def write_quantised(model_dir: Path, directory: Path) -> None:
    """Each projection as int8 with a scale for each of its rows; inputs are to be rounded alike, by token."""
    tensors = load_file(model_dir / "model.safetensors")
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        scale = tensors[name].abs().amax(-1, keepdim=True) / 127
        tensors[name] = (tensors[name] / scale).round().to(torch.int8)
        tensors[name + "_scale"] = scale
    shutil.copytree(model_dir, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    kind = {"num_bits": 8, "type": "int", "symmetric": True}
    weights = {**kind, "strategy": "channel", "dynamic": False}
    inputs = {**kind, "strategy": "token", "dynamic": True}
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
        "ignore": ["lm_head"],
    }
    (directory / "config.json").write_text(json.dumps(config))


def rounded(model_dir: Path) -> Reference:
    """Plain PyTorch in float32, with the weights that the integers stand for."""
    reference = Reference(model_dir)
    for name, layer in reference.model.named_modules():
        if name.endswith("_proj"):
            scale = layer.weight.detach().abs().amax(-1, keepdim=True) / 127
            layer.weight.data = (layer.weight.detach() / scale).round() * scale
    return reference


def scaled(model_dir: Path) -> Reference:
    """The same where the scales of one projection are taken for twice as large."""
    reference = rounded(model_dir)
    reference.model.model.layers[0].mlp.down_proj.weight.data *= 2
    return reference


@pytest.fixture
def sampler(tmp_path: Path) -> Iterator[Sampler]:
    model_dir = make_model(tmp_path / "model", tied=False)
    write_quantised(model_dir, tmp_path / "quantised")
    with replica(tmp_path, tmp_path / "quantised", "--kv-cache-gib", "0.25") as started:
        started.store_adapter(ADAPTER)
        write_full(started.stored(FULL), model_dir, make_full(model_dir, FULL))
        yield started


async def test_its_base_model_is_sampled_and_what_it_cannot_run_is_announced_and_refused(
    sampler: Sampler, tmp_path: Path
) -> None:
    async with sampler.client() as stub:
        result = await sample(stub, request(prompt(1, 20), scores=True, max_tokens=12))
        tokens = prompt(1, 20) + ints(result.sequences[0].tokens)
        found = torch.cat([floats(result.prompt_logprobs)[1:], floats(result.sequences[0].logprobs)])
        for reference, like_it in ((rounded, True), (scaled, False)):
            expected = reference(tmp_path / "model").sequence_logprobs(tokens)
            difference = float((found - expected).abs().max())
            assert (difference < ROUNDING) == like_it, f"{difference} to {reference.__name__}"
        for version, code in ((ADAPTER, "adapters_not_supported"), (FULL, "full_models_not_supported")):
            refused = (await stub.Sample(request(prompt(1, 5), version), timeout=120)).error
            assert (refused.category, refused.code) == (types_pb2.ERROR_CATEGORY_USER, code)
        await sample(stub, request(prompt(1, 5)))
    client = connect(sampler.redis_url)
    (record,) = await registry.live(client, "sampler")
    await client.aclose()
    assert (record.quantization, record.adapts, record.full_models) == ("compressed-tensors", False, False)
