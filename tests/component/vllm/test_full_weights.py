"""What vLLM's loader makes of weights, on a small module instead of an engine: tried, and replaced."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import DeviceConfig, VllmConfig
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.reload.layerwise import (
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from services.common.contract.errors import DataLoss, InvalidRequest
from services.sampler.worker import full_weights

pytestmark = pytest.mark.heavy


class Int8(QuantizeMethodBase):
    """Keeps weights as int8 with a scale for each row; what is loaded lies otherwise than what runs."""

    def create_weights(self, layer: torch.nn.Module, *_: Any, **__: Any) -> None:
        layer.weight = torch.nn.Parameter(torch.zeros(4, 3, dtype=torch.int8), requires_grad=False)
        layer.scale = torch.nn.Parameter(torch.zeros(4), requires_grad=False)

    def apply(self, *_: Any, **__: Any) -> torch.Tensor:
        raise NotImplementedError

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.weight = torch.nn.Parameter(layer.weight.data.T.contiguous(), requires_grad=False)
        layer.scale = torch.nn.Parameter(layer.scale.data * 2, requires_grad=False)


def load_half(param: torch.Tensor, loaded: torch.Tensor, half: int) -> None:
    """As vLLM loads a tensor into the parameter that it shares with others."""
    rows = param.shape[0] // 2
    param.data.narrow(0, half * rows, rows).copy_(loaded)


class Model(torch.nn.Module):
    """Loads as vLLM's models do: two tensors go into one parameter; `reports` as some of them do not."""

    def __init__(self, reports: bool) -> None:
        super().__init__()
        self.up = torch.nn.Linear(3, 4)
        self.down = torch.nn.Linear(4, 3)
        self.both = torch.nn.Linear(3, 8, bias=False)
        self.both.weight.weight_loader = load_half  # type: ignore[attr-defined]
        self.quantised: Any = torch.nn.Module()
        self.quantised.quant_method = Int8()
        self.quantised.quant_method.create_weights(self.quantised)
        self.reports = reports

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> set[str] | None:
        parameters, loaded = dict(self.named_parameters()), set()
        for name, tensor in tensors:
            target = name.replace("first", "both").replace("second", "both")
            parameter: Any = parameters[target]
            loader = getattr(parameter, "weight_loader", default_weight_loader)
            loader(parameter, tensor, *([int("second" in name)] if target != name else []))
            loaded.add(target)
        return loaded if self.reports else None


class Past(Model):
    """Writes a tensor to its parameter itself, as vLLM's GPT-OSS does with experts."""

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> set[str] | None:
        given = dict(tensors)
        with torch.no_grad():
            self.down.weight.copy_(given.pop("down.weight"))
        loaded = super().load_weights(given.items())
        return None if loaded is None else loaded | {"down.weight"}


def others() -> dict[str, torch.Tensor]:
    """The tensors of a model's files."""
    return {
        "up.weight": torch.randn(4, 3),
        "up.bias": torch.randn(4),
        "down.weight": torch.randn(3, 4),
        "down.bias": torch.randn(3),
        "first.weight": torch.randn(4, 3),
        "second.weight": torch.randn(4, 3),
        "quantised.weight": torch.randint(-128, 128, (4, 3), dtype=torch.int8),
        "quantised.scale": torch.rand(4),
    }


@pytest.fixture(params=[True, False], ids=["reports", "does not report"])
def mine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    return made(Model(request.param), others(), monkeypatch)


def made(model: Model, files: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A worker whose model was loaded from its files."""
    monkeypatch.setattr(full_weights, "base_tensors", lambda _: iter(files.items()))
    record_metadata_for_reloading(model)
    model.load_weights(files.items())
    model.quantised.quant_method.process_weights_after_loading(model.quantised)
    return SimpleNamespace(
        model_runner=SimpleNamespace(get_model=lambda: model),
        device=torch.device("cpu"),
        vllm_config=VllmConfig(device_config=DeviceConfig("cpu")),
        model=model,
        files=files,
    )


def bits(model: torch.nn.Module) -> dict[str, tuple[int, list[float]]]:
    """Where each parameter lies and what it is."""
    return {name: (p.data_ptr(), p.flatten().tolist()) for name, p in model.named_parameters()}


def running(tensors: dict[str, torch.Tensor]) -> dict[str, list[float]]:
    """What a model runs with that was loaded from these files."""
    model = Model(reports=True)
    model.load_weights(tensors.items())
    model.quantised.quant_method.process_weights_after_loading(model.quantised)
    return {name: p.flatten().tolist() for name, p in model.named_parameters()}


def values(model: torch.nn.Module) -> dict[str, list[float]]:
    return {name: found for name, (_, found) in bits(model).items()}


def test_weights_that_fit_pass_and_nothing_is_replaced_before_they_are_loaded(mine: SimpleNamespace) -> None:
    before, wanted = bits(mine.model), others()
    for _ in range(2):
        full_weights.check(mine, wanted.items())
        assert bits(mine.model) == before
    full_weights.load(mine, wanted.items())
    after = bits(mine.model)
    assert values(mine.model) == running(wanted)
    assert {name: place for name, (place, _) in after.items()} == {
        n: place for n, (place, _) in before.items()
    }
    full_weights.check(mine, mine.files.items())
    full_weights.load(mine, mine.files.items())
    assert bits(mine.model) == before


@pytest.mark.parametrize("name", list(others()))
def test_weights_that_lack_a_tensor_are_refused_and_nothing_is_replaced(
    mine: SimpleNamespace, name: str
) -> None:
    before, whole = bits(mine.model), others()
    layer = name.partition(".")[0].replace("first", "both").replace("second", "both")
    with pytest.raises(InvalidRequest, match=f"lack .*{layer}"):
        full_weights.check(mine, ((other, tensor) for other, tensor in whole.items() if other != name))
    assert bits(mine.model) == before
    full_weights.check(mine, whole.items())


def test_weights_that_do_not_fit_are_refused_and_nothing_is_replaced(mine: SimpleNamespace) -> None:
    before, whole = bits(mine.model), others()
    wrong = {
        "do not fit": whole | {"down.weight": torch.zeros(4, 3)},
        "do not fit this model: 'side.weight'": whole | {"side.weight": torch.zeros(3)},
        r"lack .*in all": {},
    }
    for hint, tensors in wrong.items():
        with pytest.raises(InvalidRequest, match=hint):
            full_weights.check(mine, tensors.items())
        assert bits(mine.model) == before, hint
    full_weights.check(mine, whole.items())


def test_weights_are_refused_of_which_the_model_would_keep_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files, model = others(), Past(reports=True)
    worker = made(model, files, monkeypatch)
    before = bits(model)
    assert before["down.weight"][1] == files["down.weight"].flatten().tolist()
    for tensors in (others(), files):
        with pytest.raises(InvalidRequest, match=r"cannot replace down\.weight of this model \(1 in all\)"):
            full_weights.check(worker, tensors.items())
        assert bits(model) == before


def test_files_of_the_base_model_that_were_cut_short_do_not_go_into_it(
    mine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_weights.check(mine, others().items())
    full_weights.check_base(mine)
    before, left = bits(mine.model), list(mine.files.items())[:-1]
    monkeypatch.setattr(full_weights, "base_tensors", lambda _: iter(left))
    with pytest.raises(DataLoss, match=r"not what they were: the weights lack .*quantised"):
        full_weights.check_base(mine)
    assert bits(mine.model) == before


def test_a_load_that_breaks_off_is_made_good_by_the_next_one(mine: SimpleNamespace) -> None:
    before = bits(mine.model)

    def cut_off() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(others().items())[:5]
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="gone"):
        full_weights.load(mine, cut_off())
    assert bits(mine.model) != before
    full_weights.check(mine, mine.files.items())
    full_weights.load(mine, mine.files.items())
    assert bits(mine.model) == before


def test_vllm_by_itself_loads_a_bias_at_once_and_has_no_way_to_give_a_reload_up() -> None:
    model = Model(reports=True)
    record_metadata_for_reloading(model)
    initialize_layerwise_reload(model)
    model.load_weights([("up.bias", torch.arange(4.0))])
    assert model.up.weight.is_meta
    assert model.up.bias.tolist() == [0, 1, 2, 3]
    assert {name for name in layerwise.__all__ if "reload" in name or "finalize" in name} == {
        *("record_metadata_for_reloading", "initialize_layerwise_reload"),
        *("finalize_layerwise_processing", "finalize_layerwise_reload"),
    }
