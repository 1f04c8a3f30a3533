"""Rows and passes for engine tests."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import torch.distributed as dist

from services.common.contract.experts.routing import RoutedExperts, Routing
from services.common.contract.tensors import HostTensor
from services.trainer.compute.data import (
    AdamSpec,
    LoraSpec,
    MicroBatch,
    ModelState,
    Pass,
    PassOp,
    Row,
)
from services.trainer.compute.engine import Engine
from tests.component.engine.reference import values

VOCAB = 512

# Far from the default: every field matters, and a large eps makes a step proportional to the gradient,
# so that a wrong gradient cannot hide behind Adam's normalisation.
ADAM = AdamSpec(learning_rate=0.5, beta1=0.8, beta2=0.9, eps=10.0, weight_decay=0.02, grad_clip_norm=20.0)


def array(values: np.ndarray) -> HostTensor:
    kind = {"f": ("float32", "<f4"), "i": ("int64", "<i8")}[values.dtype.kind]
    return HostTensor(kind[0], values.shape, values.astype(kind[1]).tobytes())


def ce_row(seed: int, length: int, columns: int = 0) -> Row:
    """A cross_entropy row with fractional, negative and zero weights; `columns` targets per position."""
    rng = np.random.default_rng(seed)
    shape = (length, columns) if columns else (length,)
    weights = rng.choice([0.0, 1.0, 0.5, -0.25], shape).astype(np.float32)
    inputs = {"target_tokens": array(rng.integers(0, VOCAB, shape)), "weights": array(weights)}
    return Row(0, 0, rng.integers(0, VOCAB, length).astype("<i4").tobytes(), inputs)


def is_row(seed: int, length: int) -> Row:
    """An importance_sampling row whose first third is a prompt."""
    rng = np.random.default_rng(seed)
    sampled = np.arange(length) >= length // 3
    q = np.where(sampled, -np.log(VOCAB) + rng.normal(0, 0.3, length), 0.0).astype(np.float32)
    advantages = np.where(sampled, rng.normal(0, 1, length), 0.0).astype(np.float32)
    targets = np.where(sampled, rng.integers(0, VOCAB, length), 0)
    inputs = {
        "target_tokens": array(targets),
        "logprobs": array(q),
        "advantages": array(advantages),
    }
    return Row(0, 0, rng.integers(0, VOCAB, length).astype("<i4").tobytes(), inputs)


def critic_row(seed: int, length: int, weighted: bool = True) -> Row:
    """A ppo_critic row; with weights, its first third is a prompt."""
    rng = np.random.default_rng(seed)
    inputs = {
        "values": array(rng.normal(0, 0.3, length).astype(np.float32)),
        "returns": array(rng.normal(0.5, 1, length).astype(np.float32)),
    }
    if weighted:
        inputs["weights"] = array((np.arange(length) >= length // 3).astype(np.float32) * 0.5)
    return Row(0, 0, rng.integers(0, VOCAB, length).astype("<i4").tobytes(), inputs)


def given_experts(row: Row, routing: Routing, seed: int = 0) -> Row:
    """The row with random experts for all of its tokens."""
    scores = np.random.default_rng(seed).random((row.length, routing.layers, routing.experts))
    ids = scores.argsort(-1)[..., : routing.top_k].astype(routing.dtype)
    return msgspec.structs.replace(row, routed=RoutedExperts(ids.shape, ids.tobytes()))


def with_input(row: Row, name: str, values: np.ndarray) -> Row:
    return msgspec.structs.replace(row, loss_inputs={**row.loss_inputs, name: array(values)})


Placed = tuple[PassOp, Sequence[Row]]


def work(*placed: Placed, cut: Sequence[Sequence[tuple[int, int]]] | None = None) -> Pass:
    """A pass of operations with their rows; `cut` lists (op, index) per micro-batch, else one holds all."""
    rows = {
        (number, index): msgspec.structs.replace(row, op=number, index=index)
        for number, (op, op_rows) in enumerate(placed)
        for index, row in enumerate(op_rows)
    }
    batches = cut if cut is not None else [list(rows)]
    return Pass([op for op, _ in placed], [MicroBatch([rows[key] for key in batch]) for batch in batches])


def op(model_id: str, seq_id: int = 1, loss_fn: str = "cross_entropy", forward_only: bool = False) -> PassOp:
    return PassOp(model_id, seq_id, loss_fn, {}, forward_only)


def trained_looking(state: ModelState, seed: int) -> ModelState:
    """The state with a B (and value head) that is not zero, as after training, so that A has a gradient."""
    rng = np.random.default_rng(seed)
    adapter = {
        name: array(rng.normal(0, 0.02, held.shape).astype(np.float32))
        if name.endswith(("B", "weight"))
        else held
        for name, held in state.adapter.items()
    }
    return msgspec.structs.replace(state, adapter=adapter)


LORA = LoraSpec(rank=8, seed=3)
CRITIC = LoraSpec(rank=8, seed=3, role="critic")
NO_CLIP = msgspec.structs.replace(ADAM, grad_clip_norm=0.0)


def on_all_ranks(state: ModelState) -> ModelState:
    """Rank 0's, as commands bring it to every rank."""
    if dist.get_world_size() == 1:
        return state
    given = [msgspec.msgpack.encode(state)]
    dist.broadcast_object_list(given, 0)
    return msgspec.msgpack.decode(given[0], type=ModelState)


def trained_model(engine: Engine, model_id: str, lora: LoraSpec = LORA, seed: int = 0) -> ModelState:
    """Creates a model whose adapter looks trained; returns its state."""
    engine.create_model(model_id, lora)
    state = trained_looking(on_all_ranks(engine.state(model_id)), seed)
    engine.load_state(model_id, state, optimizer=False)
    return state


def flat(state: ModelState) -> np.ndarray:
    """All of a model's parameters."""
    return np.concatenate([values(array).ravel() for array in state.adapter.values()])
