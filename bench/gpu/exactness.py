"""How far the engine is from transformers with PEFT in float32, in log-probabilities and in gradients.

In bfloat16 the yardstick is what transformers with PEFT is itself away from float32, in bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from bench.gpu.engine import one_micro_batch, start
from bench.gpu.yardstick import TARGETS
from services.common.contract.tensors import from_values
from services.launcher.tiny_model import make_tiny_model
from services.trainer.compute.data import AdamSpec, LoraSpec, ModelState
from services.trainer.compute.engine import Engine

LOGPROBS, GRADIENT = 5e-5, 1e-4
"""In float32: nats, the largest difference; and the norm of the difference over that of the gradient."""
FACTOR = 1.5
"""In bfloat16 an error is at most so many times that of plain transformers."""

_BIG = 1e4
LORAS = {"a": LoraSpec(32, 1), "b": LoraSpec(16, 2)}

Sides = dict[str, tuple[list[np.ndarray], np.ndarray]]
"""Of each model the log-probabilities of its sequences, and the gradient of their negative sum."""


def model_for(device: str, directory: Path) -> Path:
    """A small random model; on CUDA with heads of 128 as real ones have, for which there are kernels."""
    if device == "cuda":
        return make_tiny_model(
            directory, vocab=4096, hidden=1024, layers=4, heads=8, kv_heads=4, intermediate=3072
        )
    return make_tiny_model(directory, layers=2)


def errors(directory: Path, device: str, dtype: str, vocab: int) -> dict[str, float]:
    """Those of two models in one micro-batch, the larger one of each.

    Returns:
        "logprobs": the root of the mean square in bfloat16, the largest in float32; "gradient"; and in
        bfloat16 "plain_logprobs" and "plain_gradient".
    """
    rng = np.random.default_rng(7)
    sequences = {
        model_id: [rng.integers(0, vocab, length) for length in (150, 37, 260)] for model_id in LORAS
    }
    engine = start(directory, device, dtype)
    try:
        states = {model_id: _trained(engine, model_id, lora) for model_id, lora in LORAS.items()}
        ours = _ours(engine, states, sequences)
    finally:
        for model_id in LORAS:
            engine.drop_model(model_id)
    exact = _plain(directory, device, "float32", states, sequences)
    found = _compared(ours, exact, largest=dtype == "float32")
    if dtype == "bfloat16":
        plain = _compared(_plain(directory, device, dtype, states, sequences), exact, largest=False)
        found |= {f"plain_{name}": value for name, value in plain.items()}
    return found


def _trained(engine: Engine, model_id: str, lora: LoraSpec) -> ModelState:
    """A new model whose B is not zero, as after training, so that A has a gradient."""
    engine.create_model(model_id, lora)
    rng = np.random.default_rng(lora.seed)
    fresh = engine.state(model_id)
    adapter = {
        name: from_values(rng.normal(0, 0.02, held.shape).astype("<f4")) if name.endswith("B") else held
        for name, held in fresh.adapter.items()
    }
    state = msgspec.structs.replace(fresh, adapter=adapter)
    engine.load_state(model_id, state, optimizer=False)
    return state


def _ours(engine: Engine, states: dict[str, ModelState], sequences: dict[str, list[np.ndarray]]) -> Sides:
    models = list(states)
    dealt = [tokens for each in zip(*sequences.values(), strict=True) for tokens in each]
    results = engine.run_pass(one_micro_batch(models, dealt))
    found: Sides = {}
    for number, model_id in enumerate(models):
        mine = [result for result in results if result.op == number]
        assert all(result.failure is None for result in mine), mine[0].failure
        logprobs = [result.outputs["logprobs"].values() for result in mine]
        found[model_id] = logprobs, _gradient(engine, model_id, states[model_id])
    return found


def _gradient(engine: Engine, model_id: str, before: ModelState) -> np.ndarray:
    """What a step shows of it: a first step of Adam is lr * g / (|g| + eps)."""
    engine.optim_step(model_id, AdamSpec(learning_rate=_BIG, eps=_BIG))
    moved = _flat(before) - _flat(engine.state(model_id))
    return moved * _BIG / (_BIG - np.abs(moved))


def _flat(state: ModelState) -> np.ndarray:
    held = state.adapter
    return np.concatenate([held[name].values().ravel().astype(np.float64) for name in sorted(held)])


def _plain(
    directory: Path,
    device: str,
    dtype: str,
    states: dict[str, ModelState],
    sequences: dict[str, list[np.ndarray]],
) -> Sides:
    found: Sides = {}
    for model_id, state in states.items():
        base = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).to(device)
        lora = LoraConfig(
            r=LORAS[model_id].rank, lora_alpha=32, target_modules=TARGETS, task_type="CAUSAL_LM"
        )
        model: Any = get_peft_model(base, lora).eval()
        masters = dict(model.named_parameters())
        named = {name: masters[f"base_model.model.{name}.default.weight"] for name in sorted(state.adapter)}
        with torch.no_grad():
            for name, parameter in named.items():
                parameter.copy_(torch.from_numpy(state.adapter[name].values().copy()))
        logprobs = []
        for tokens in sequences[model_id]:
            given = torch.from_numpy(tokens).to(device)
            distribution = model(input_ids=given[None]).logits[0].float().log_softmax(-1)
            scores = distribution.gather(1, given.roll(-1)[:, None])[:, 0]
            (-scores.sum()).backward()
            logprobs.append(scores.detach().cpu().numpy())
        gradients = [parameter.grad for parameter in named.values()]
        assert all(gradient is not None for gradient in gradients)
        flat = [gradient.double().flatten().cpu().numpy() for gradient in gradients]
        found[model_id] = logprobs, np.concatenate(flat)
    return found


def _compared(found: Sides, exact: Sides, *, largest: bool) -> dict[str, float]:
    logprobs, gradients = [], []
    for model_id, (scores, gradient) in found.items():
        expected_scores, expected = exact[model_id]
        difference = np.concatenate(scores).astype(np.float64) - np.concatenate(expected_scores)
        error = np.max(np.abs(difference)) if largest else np.sqrt(np.mean(difference**2))
        logprobs.append(float(error))
        gradients.append(_norm(gradient - expected) / _norm(expected))
    return {"logprobs": _worst(logprobs), "gradient": _worst(gradients)}


def _norm(values: np.ndarray) -> float:
    return float(np.linalg.norm(values))


def _worst(values: Sequence[float]) -> float:
    """Not a number counts as infinite."""
    return max(values) if np.isfinite(values).all() else float("inf")
