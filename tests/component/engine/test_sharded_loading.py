"""What a model is made of is under ZeRO-3 what it is without: its weights, by whatever names and in whatever
pieces files have them, and its buffers, also those that no file has, as rotary frequencies, which DeepSpeed
would round."""

from __future__ import annotations

from pathlib import Path

import deepspeed
import pytest
import safetensors.torch
import torch
from torch import Tensor

from services.common.contract.errors import InvalidRequest
from services.common.worlds.sharding import Sharding
from services.trainer.compute.base_model import (
    _deepspeed_config,
    computes_flat,
    init_distributed,
    load_model,
)
from services.trainer.compute.recurrent.layers import is_recurrent
from services.trainer.compute.sharding import loading
from tests.component.engine import quantised
from tests.unit.trainer.compute.architectures import (
    FLAT,
    HYBRID,
    SINGLE,
    config_of,
    random_model,
    with_pictures,
)

pytestmark = [pytest.mark.heavy, pytest.mark.usefixtures("one_rank")]

# llama4_text stands for pictures too in its files, and is not read from these alone.
SERVED = {**FLAT, **{name: settings for name, settings in SINGLE.items() if name != "llama4_text"}}


@pytest.mark.parametrize("name", SERVED)
def test_every_architecture_keeps_its_buffers(name: str, tmp_path: Path) -> None:
    random_model(config_of(name, SERVED[name]), "eager").save_pretrained(tmp_path)
    init_distributed("cpu")
    expected = dict(load_model(str(tmp_path), torch.bfloat16, None).named_buffers())
    config = _deepspeed_config(3, torch.bfloat16, Sharding())
    found = dict(load_model(str(tmp_path), torch.bfloat16, config).named_buffers())
    assert {each: held.dtype for each, held in found.items()} == {
        each: held.dtype for each, held in expected.items()
    }
    assert torch.float32 in {held.dtype for held in found.values()}
    assert all(torch.equal(held, expected[each]) for each, held in found.items())


def old_layout(directory: Path) -> None:
    """Brings files of a model that reads pictures too into the other layout."""
    weights = safetensors.torch.load_file(directory / "model.safetensors")
    renamed = {
        name.replace("language_model.model.", "model.language_model."): each for name, each in weights.items()
    }
    assert renamed.keys() != weights.keys()
    safetensors.torch.save_file(renamed, directory / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    "name", ["gemma3_text", "gemma3_text of another layout", "qwen3_5_text", "qwen3_5_moe_text"]
)
def test_of_a_model_that_reads_pictures_too_the_text_model_is_trained(
    name: str, stage: int, tmp_path: Path
) -> None:
    family, *layout = name.split(maxsplit=1)
    text = random_model(config_of(family, {**SERVED[family], "vocab_size": 512}), "eager")
    with_pictures(text).save_pretrained(tmp_path)
    if layout:
        old_layout(tmp_path)
    init_distributed("cpu")
    config = _deepspeed_config(3, torch.float32, Sharding()) if stage else None
    model = load_model(str(tmp_path), torch.float32, config)
    assert type(model) is type(text) and model.config.model_type == family
    for expected, found in zip(text.parameters(), model.parameters(), strict=True):
        assert hasattr(found, "ds_id") == bool(stage)
        with deepspeed.zero.GatheredParameters([found], enabled=bool(stage)):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("stage", [0, 3])
def test_files_that_lack_a_weight_are_refused(stage: int, tmp_path: Path) -> None:
    random_model(config_of("llama", {}), "eager").save_pretrained(tmp_path)
    weights = safetensors.torch.load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    init_distributed("cpu")
    config = _deepspeed_config(3, torch.float32, Sharding()) if stage else None
    with pytest.raises(
        InvalidRequest, match=r"its files lack 1 weights .* as model\.layers\.1\.mlp\.up_proj"
    ):
        load_model(str(tmp_path), torch.float32, config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", quantised.KINDS)
def test_quantised_files_are_read_as_what_they_stand_for(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    weights = quantised.make(kind, tmp_path)
    init_distributed("cpu")
    found = dict(load_model(str(tmp_path), dtype, None).named_parameters())
    assert {name for name in weights if name in found} == found.keys()
    for name, weight in found.items():
        assert weight.dtype == dtype
        assert torch.equal(weight, weights[name].to(dtype)), name


@pytest.mark.parametrize("kind", quantised.KINDS)
def test_quantised_files_of_which_each_rank_would_have_all_are_refused(kind: str, tmp_path: Path) -> None:
    quantised.make(kind, tmp_path)
    init_distributed("cpu")
    with pytest.raises(InvalidRequest, match=rf"quantised \({kind}\), .* --zero-stage 3"):
        load_model(str(tmp_path), torch.float32, _deepspeed_config(3, torch.float32, Sharding()))


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("form", ["other names", "nothing said"])
def test_quantised_files_of_a_form_that_is_not_read_are_refused(
    form: str, stage: int, tmp_path: Path
) -> None:
    quantised.make("fp8", tmp_path)
    if form == "other names":
        quantised.rescaled(tmp_path, "_scale")
    if stage or form == "nothing said":
        quantised.unnamed(tmp_path)
    init_distributed("cpu")
    config = _deepspeed_config(3, torch.float32, Sharding()) if stage else None
    with pytest.raises(InvalidRequest, match=r"does not read: it leaves out model\..*proj\.weight_scale"):
        load_model(str(tmp_path), torch.float32, config)


@pytest.mark.parametrize("name", ["gemma3_text", "qwen2_moe", "gpt_oss", "deepseek_v3", "qwen3_5_moe_text"])
def test_weights_are_those_of_the_files_and_no_more_than_a_layer_is_converted_at_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_model(config_of(name, SERVED[name]), "eager").save_pretrained(tmp_path)
    init_distributed("cpu")
    expected = dict(load_model(str(tmp_path), torch.float32, None).named_parameters())
    read: list[set[str]] = []
    convert = loading._converted

    def converted(model: object, state: dict[str, Tensor], load_config: object) -> dict[str, Tensor]:
        read.append({".".join(each.split(".")[:3]) for each in state if ".layers." in each})
        return convert(model, state, load_config)

    monkeypatch.setattr(loading, "_converted", converted)
    config = _deepspeed_config(3, torch.float32, Sharding())
    found = dict(load_model(str(tmp_path), torch.float32, config).named_parameters())
    assert all(len(layers) <= 1 for layers in read) and len(set.union(*read)) == 2
    assert found.keys() == expected.keys()
    for each, weight in found.items():
        assert torch.equal(weight.ds_tensor.view(weight.ds_shape), expected[each].data), each


@pytest.mark.parametrize("name", HYBRID)
@pytest.mark.parametrize("stage", [0, 3])
def test_linear_attention_is_loaded_to_keep_to_its_sequences(name: str, stage: int, tmp_path: Path) -> None:
    random_model(config_of(name, HYBRID[name]), "eager").save_pretrained(tmp_path)
    init_distributed("cpu")
    config = _deepspeed_config(3, torch.float32, Sharding()) if stage == 3 else None
    model = load_model(str(tmp_path), torch.float32, config)
    assert computes_flat(model)
    changed = [
        type(each).__name__ for each in model.modules() if is_recurrent(each) and "forward" in vars(each)
    ]
    assert len(changed) == 1


def test_a_weight_of_another_shape_is_an_error(tmp_path: Path) -> None:
    model = random_model(config_of("llama", SERVED["llama"]), "eager")
    model.save_pretrained(tmp_path)
    files = safetensors.torch.load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    files[name] = files[name][1:].contiguous()
    safetensors.torch.save_file(files, tmp_path / "model.safetensors", {"format": "pt"})
    init_distributed("cpu")
    config = _deepspeed_config(3, torch.float32, Sharding())
    with pytest.raises(RuntimeError, match=f"size mismatch for {name}: .47, 32. in files, not .48, 32."):
        load_model(str(tmp_path), torch.float32, config)
