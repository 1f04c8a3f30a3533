"""Replaces all weights of the model in a vLLM worker by those of another checkpoint of the same shape.

The tensors go through vLLM's own loader of the model, as at start-up: it fuses, shards for this worker's
tensor-parallel rank and packs them, so the shards are right by construction. Every tensor keeps its place in
memory, so CUDA graphs stay valid.

Invariant: the same tensors give the same bits, so the base model's weights come back as they were. `check`
leaves every weight as it is, and lets nothing pass of which less goes into some layer than of the model's own
files, whether the model reports what it loads or not, and whether it quantises that or not. When `load` fails
all the same (a file that cannot be read any more, no memory) the model is whole in its parts but holds a
mixture; it must not run before a `load` succeeds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from safetensors import safe_open
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.reload.layerwise import (
    _place_kernel_tensors,
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.meta import to_meta_tensor

from services.common.contract.errors import DataLoss, InvalidRequest
from services.sampler.worker.stored_model import weight_files

NamedTensors = Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class _Taken:
    """What a model took of some tensors.

    Attributes:
        names: of its parameters, as far as it reports them.
        elements: of each layer; what is put together from several tensors may have a part of them.
        past: parameters that it writes to itself, past the loaders: when weights are replaced it writes to
            what nobody reads.
    """

    names: frozenset[str]
    elements: Mapping[str, int]
    past: frozenset[str]


_WHOLE: WeakKeyDictionary[torch.nn.Module, _Taken] = WeakKeyDictionary()
"""What each model took of the files that it was started with."""

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def base_tensors(worker: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that the engine was started with, from their files."""
    loader = get_model_loader(worker.vllm_config.load_config)
    yield from loader.get_all_weights(worker.vllm_config.model_config, worker.model_runner.get_model())


def stored_tensors(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a model's directory, read as they are used.

    Raises:
        SnapshotNotFound, DataLoss: it is not whole. It is looked through at once.
    """
    return _read(weight_files(directory))


def _read(files: Sequence[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                yield name, file.get_tensor(name)


def check(worker: Any, tensors: NamedTensors) -> None:
    """Has vLLM's loader take tensors by their Hugging Face names, without a weight being replaced. Blocking;
    no step may run meanwhile.

    Raises:
        InvalidRequest: one is missing, unknown, or of another shape.
        DataLoss: the base model's own files are no measure any more.
    """
    model = worker.model_runner.get_model()
    if model not in _WHOLE:
        try:
            _WHOLE[model] = _tried(worker, base_tensors(worker))
        except (ValueError, KeyError, AssertionError, RuntimeError, OSError) as error:
            raise DataLoss(f"the base model's files are not what they were: {error}") from error
    whole = _WHOLE[model]
    if whole.past:
        raise InvalidRequest(
            f"vLLM cannot replace {', '.join(sorted(whole.past)[:3])} of this model ({len(whole.past)} in "
            "all): its loader writes past what replaces weights; sample the base model or an adapter of it",
            "full_models_not_supported",
        )
    try:
        found = _tried(worker, tensors)
    except (ValueError, KeyError, AssertionError, RuntimeError) as error:
        raise InvalidRequest(f"the weights do not fit this model: {error}") from error
    missing = sorted(whole.names - found.names) or [
        f"a part of {layer}" for layer, count in whole.elements.items() if found.elements[layer] < count
    ]
    if missing:
        raise InvalidRequest(f"the weights lack {', '.join(missing[:3])} ({len(missing)} in all)")


def check_base(worker: Any) -> None:
    """As `check`, of the base model's own files, which may have changed since the engine was started.

    Raises:
        DataLoss: they have.
    """
    try:
        check(worker, base_tensors(worker))
    except InvalidRequest as error:
        raise DataLoss(f"the base model's files are not what they were: {error.message}") from error


@torch.inference_mode()
def _tried(worker: Any, tensors: NamedTensors) -> _Taken:
    """What vLLM's loader takes of tensors. Raises what that raises when they do not fit."""
    model = worker.model_runner.get_model()
    tied = _tied_heads(model)
    with set_current_vllm_config(worker.vllm_config), _nothing_processed() as loaded:
        initialize_layerwise_reload(model)
        try:
            # What stays in its layer is written to there, whoever writes.
            apart = {name for name, tensor in model.named_parameters() if tensor.is_meta}
            _all_on_meta(model)
            names = frozenset(model.load_weights(_without_tied_head(tensors) if tied else tensors) or ())
            infos = {name: get_layerwise_info(layer) for name, layer in model.named_modules()}
            elements = {name: info.load_numel for name, info in infos.items()}
            for info in infos.values():
                loaded[id(info)].update(name for name, _ in info.loaded_weights)
            by_loaders = {
                f"{layer}.{name}" if layer else name
                for layer, info in infos.items()
                for name in loaded[id(info)]
            }
        finally:
            _put_back(model)
    return _Taken(names, elements, names & apart - by_loaders)


@torch.inference_mode()
def load(worker: Any, tensors: NamedTensors) -> None:
    """Loads tensors that passed `check`, or the base model's own. Blocking; no step may run meanwhile."""
    model = worker.model_runner.get_model()
    tied = _tied_heads(model)
    if worker.device.type == "cuda":
        # The current device is a thread's own; and the last step's kernels may still run.
        torch.cuda.set_device(worker.device)
        torch.cuda.synchronize()
    with set_current_vllm_config(worker.vllm_config):
        initialize_layerwise_reload(model)
        try:
            model.load_weights(_without_tied_head(tensors) if tied else tensors)
            finalize_layerwise_reload(model, worker.vllm_config.model_config)
        except BaseException:
            _put_back(model)
            raise
        for head in tied:
            # Whatever was packed from the embedding's old values.
            head.quant_method.process_weights_after_loading(head)
    if worker.device.type == "cuda":
        torch.cuda.synchronize()


@contextmanager
def _nothing_processed() -> Iterator[dict[int, set[str]]]:
    """Layers whose tensors have all come do not go into the model meanwhile. Yields the names of these
    tensors by the layer's info."""
    loaded: dict[int, set[str]] = defaultdict(set)

    def forget(_: Any, info: Any) -> None:
        loaded[id(info)].update(name for name, _ in info.loaded_weights)
        info.loaded_weights.clear()

    process = layerwise._layerwise_process
    layerwise._layerwise_process = forget
    try:
        yield loaded
    finally:
        layerwise._layerwise_process = process


def _all_on_meta(model: torch.nn.Module) -> None:
    """Has tensors stand aside that vLLM leaves in their layers during a reload, biases above all
    (vllm-project/vllm#49586): its loader would write to them at once."""
    for layer in model.modules():
        for own in (layer._parameters, layer._buffers):
            for name, tensor in own.items():
                if tensor is not None and not tensor.is_meta:
                    own[name] = to_meta_tensor(tensor)


def _put_back(model: torch.nn.Module) -> None:
    """Ends a reload before its time: layers that were not loaded get their old tensors back. vLLM has no way
    to; vllm-project/vllm#51378 would make a reload one transaction."""
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            _place_kernel_tensors(layer, info)
        info.reset()
    # vLLM puts it aside for a reload, and takes it up when one is finished.
    model._do_torchao_reload = model._original_do_torchao_reload


def _tied_heads(model: torch.nn.Module) -> list[Any]:
    """Output heads that share the input embedding's tensor."""
    heads = [module for module in model.modules() if isinstance(module, ParallelLMHead)]
    owners = [module for module in model.modules() if not isinstance(module, ParallelLMHead)]
    shared = {id(p) for owner in owners for p in owner.parameters(recurse=False)}
    return [head for head in heads if id(head.weight) in shared]


def _without_tied_head(tensors: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Leaves out the head of a model whose head is its embedding, by the names that a text model has for
    them, or one that reads pictures too.

    Raises:
        ValueError: it is another one.
    """
    seen: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        known = name.replace("language_model.model.", "model.").replace("language_model.", "")
        if known in (_HEAD, _EMBEDDING):
            seen[known] = tensor
        if known != _HEAD:
            yield name, tensor
    if _HEAD in seen and not torch.equal(seen[_HEAD], seen[_EMBEDDING]):
        raise ValueError(f"{_HEAD} differs from {_EMBEDDING}, which this model ties to it")
