"""A model that trains all of its weights: a copy of the base model in a DeepSpeed engine of its own.

Everything about full models that knows DeepSpeed's insides is here. The engine runs with
`managed_gradient_accumulation` off: backward passes only accumulate, a step reduces and applies. Losses are
token sums, so DeepSpeed's average over the ranks is undone by a factor on the loss.

Optimizer state is always sharded, since nothing is gained by holding it twice: a trainer of ZeRO stage 0
gives its full models stage 1. Under bfloat16 the least is stage 2, which accumulates gradients in float32 on
every stage above; master weights and moments are always float32.

Invariants: forward and backward passes, steps and states are collectives of all ranks. Gradients go
straight into one sum, so an operation cannot be taken out of it again: when one fails after its backward
pass has begun, the sum is in doubt and the world must be restarted and replay (`fail` raises).
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from services.common.contract.errors import InvalidRequest, TinsmithError
from services.common.contract.roles import Role
from services.common.contract.tensors import HostTensor, from_values
from services.trainer.compute.attention import Sequences
from services.trainer.compute.base_model import Scorer, computes_flat, load_model
from services.trainer.compute.collate import idle_batch
from services.trainer.compute.data import AdamSpec, Failure, ModelState
from services.trainer.compute.exchange import any_rank
from services.trainer.compute.logprobs import Targets
from services.trainer.compute.lora.grouped import LoraRouter
from services.trainer.compute.tenant import check_shapes

log = logging.getLogger(__name__)

_MOMENTS = ("exp_avg", "exp_avg_sq")
# Elements that DeepSpeed reduces or gathers at once.
_BUCKET = 1 << 25


@dataclass(frozen=True)
class FullModelConfig:
    """How full models are held.

    Attributes:
        model_path: local directory or hub id of the base model.
        device: device of this rank, for example "cpu" or "cuda:0".
        dtype: element type of the weights that compute, torch.float32 or torch.bfloat16.
        zero_stage: the trainer's, 0..3.
        offload: hold master weights and moments, and step, on the CPU.
        activation_checkpointing: keep of each block only the input for the backward pass.
    """

    model_path: str
    device: str
    dtype: torch.dtype
    zero_stage: int
    offload: bool
    activation_checkpointing: bool

    def deepspeed(self) -> dict[str, Any]:
        """The engine's configuration."""
        bfloat16 = self.dtype == torch.bfloat16
        zero: dict[str, Any] = {
            "stage": max(self.zero_stage, 2 if bfloat16 else 1),
            "overlap_comm": False,
            "reduce_bucket_size": _BUCKET,
            "allgather_bucket_size": _BUCKET,
        }
        if self.zero_stage == 3:
            zero["stage3_param_persistence_threshold"] = 10_000
        if self.offload:
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": self.device != "cpu"}
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "managed_gradient_accumulation": False,
            "zero_optimization": zero,
            # torch's AdamW steps offloaded states too: DeepSpeed's own would need a compiler at run time.
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": bfloat16},
            "data_types": {"grad_accum_dtype": "fp32"},
        }


class FullModel:
    """One model, as a `Tenant` and as what computes its own log-probabilities. Use it on all ranks alike.

    Attributes:
        collective, flat: as of `BaseModel`.
    """

    collective = True

    def __init__(self, config: FullModelConfig) -> None:
        """Starts from the weights of the base model, which are read again."""
        import deepspeed

        settings = config.deepspeed()
        self._sharded = config.zero_stage == 3
        self._device = config.device
        model = load_model(
            config.model_path,
            config.dtype,
            settings if self._sharded else None,
            config.activation_checkpointing,
        )
        model.requires_grad_(True)
        self.flat = computes_flat(model)
        self._parameters: dict[str, Any] = dict(model.named_parameters())
        scorer = Scorer(model, LoraRouter(), detached=False)
        self._adam = torch.optim.AdamW(scorer.parameters(), lr=0.0, weight_decay=0.0)
        self._engine, *_ = deepspeed.initialize(model=scorer, optimizer=self._adam, config=settings)
        self._start_moments()
        self._measure_updates()
        self._begun: set[int] = set()
        self._failures: dict[int, Failure] = {}

    def score(self, tokens: Tensor, targets: Targets, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """See `BaseModel.score`; log-probabilities are differentiable in the weights when gradients are
        enabled. There is no value head: every token has targets, and there are no values."""
        logprobs, hidden = self._engine(tokens, targets, sequences)
        return logprobs, hidden.new_zeros(0, dtype=torch.float32)

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of this rank's part of the loss to the sum."""
        self._engine.backward(loss * dist.get_world_size())

    @property
    def role(self) -> Role:
        return "policy"

    @property
    def has_gradient(self) -> bool:
        return bool(self._begun)

    def begin(self, seq_id: int) -> None:
        self._begun.add(seq_id)

    def failure(self, seq_id: int) -> Failure | None:
        return self._failures.get(seq_id)

    def fail(self, seq_id: int, failure: Failure) -> None:
        """See `Tenant.fail`.

        Raises:
            RuntimeError: a part of the operation has run.
        """
        self._failures[seq_id] = failure
        if seq_id in self._begun:
            raise RuntimeError(f"operation {seq_id} failed with its gradient begun: {failure.message}")

    def close_before(self, seq_id: int) -> None:
        """Nothing: gradients are in the sum already."""

    def clear_gradient(self) -> None:
        if self._begun:
            # DeepSpeed itself drops a gradient that is not finite, wherever its stage keeps it.
            batch = idle_batch(self._device)
            logprobs, _ = self.score(batch.tokens, batch.targets, batch.sequences)
            self.backward(logprobs.sum() * math.inf)
            self._engine.step()
        self._begun.clear()
        self._failures.clear()

    def step(self, adam: AdamSpec) -> dict[str, float]:
        for group in self._adam.param_groups:
            group.update(
                lr=adam.learning_rate,
                betas=(adam.beta1, adam.beta2),
                eps=adam.eps,
                weight_decay=adam.weight_decay,
            )
        zero = self._engine.optimizer
        zero.clip_grad = adam.grad_clip_norm
        self._change.zero_()
        self._engine.step()
        self._begun.clear()
        self._failures.clear()
        if zero.overflow:
            raise FloatingPointError("the gradient norm is not finite")
        change = self._change.to(self._device)
        dist.all_reduce(change)
        return {
            "grad_norm": float(zero._global_grad_norm),
            "learning_rate": adam.learning_rate,
            "update_norm": float(change.sqrt()),
        }

    def state(self, optimizer: bool) -> ModelState:
        """See `Tenant.state`. Ranks other than 0 get no tensors.

        Tensors are float32, by the parameter's Hugging Face name.
        """
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        step = self._steps
        weights: dict[str, HostTensor] = {}
        moments: dict[str, HostTensor] = {}
        for name, parameter in self._parameters.items():
            self._keep(weights, name, safe_get_full_fp32_param(parameter))
            for moment in _MOMENTS if optimizer and step else ():
                self._keep(moments, f"{name}.{moment}", safe_get_full_optimizer_state(parameter, moment))
        return ModelState(lora=None, adapter=weights, optimizer=moments, step=step)

    def load_state(self, state: ModelState, optimizer: bool) -> None:
        """See `Tenant.load_state`. The tensors are used on rank 0 only, the rest on all ranks."""
        import deepspeed
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        with_moments = optimizer and state.step > 0
        self._refuse_misfit(state, with_moments)
        self.clear_gradient()
        for name, parameter in self._parameters.items():
            value = self._from_rank_0(state.adapter, name)
            with (
                torch.no_grad(),
                deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=self._sharded),
            ):
                # Under ZeRO-3 rank 0's copy is what the ranks share out.
                parameter.copy_(value)
            safe_set_full_fp32_param(parameter, value)
            for moment in _MOMENTS:
                saved = self._from_rank_0(state.optimizer, f"{name}.{moment}") if with_moments else None
                moments = torch.zeros_like(value) if saved is None else saved
                safe_set_full_optimizer_state(parameter, moments, moment)
        for held in self._partitions:
            self._adam.state[held]["step"].fill_(state.step if optimizer else 0)

    def close(self) -> None:
        """Frees the memory. The model cannot be used any more."""
        self._engine.destroy()
        self._parameters.clear()
        del self._engine, self._adam
        # DeepSpeed's hooks and parameters refer to each other.
        gc.collect()
        if self._device != "cpu":
            torch.cuda.empty_cache()

    @property
    def _partitions(self) -> list[Tensor]:
        """This rank's float32 master weights, as the flat tensors that AdamW steps."""
        zero = self._engine.optimizer
        flat = zero.fp32_partitioned_groups_flat if self._sharded else zero.single_partition_of_fp32_groups
        return cast(list[Tensor], flat)

    @property
    def _steps(self) -> int:
        return int(self._adam.state[self._partitions[0]]["step"].item())

    def _start_moments(self) -> None:
        """Makes AdamW's state as its first step would, so that it can be set and read from now on."""
        for held in self._partitions:
            self._adam.state[held] = {
                "step": torch.tensor(0.0),
                **{moment: torch.zeros_like(held) for moment in _MOMENTS},
            }
        if not self._sharded:
            self._engine.optimizer._lazy_init_hp_params_optimizer_state()

    def _measure_updates(self) -> None:
        """Sums up in `_change` the squared change of this rank's master weights during a step."""
        self._change = torch.zeros((), dtype=torch.float64)
        before: list[Tensor] = []

        def note(adam: torch.optim.Optimizer, *_: Any) -> None:
            before.extend(held.detach().clone() for group in adam.param_groups for held in group["params"])

        def add(adam: torch.optim.Optimizer, *_: Any) -> None:
            after = (held.detach() for group in adam.param_groups for held in group["params"])
            for old, new in zip(before, after, strict=True):
                self._change += (new - old).norm(dtype=torch.float64).square().cpu()
            before.clear()

        self._adam.register_step_pre_hook(note)
        self._adam.register_step_post_hook(add)

    def _keep(self, tensors: dict[str, HostTensor], name: str, full: Tensor) -> None:
        if dist.get_rank() == 0:
            tensors[name] = from_values(full.detach().cpu().numpy())

    def _shape(self, name: str) -> tuple[int, ...]:
        parameter = self._parameters[name]
        return tuple(parameter.ds_shape if self._sharded else parameter.shape)

    def _refuse_misfit(self, state: ModelState, with_moments: bool) -> None:
        """Raises InvalidRequest on all ranks when rank 0's state is not one of this model."""
        misfit: TinsmithError | None = None
        if dist.get_rank() == 0:
            try:
                shapes = {name: self._shape(name) for name in self._parameters}
                check_shapes(state.adapter, shapes)
                if with_moments:
                    named = {f"{name}.{moment}": shapes[name] for name in shapes for moment in _MOMENTS}
                    check_shapes(state.optimizer, named)
            except InvalidRequest as error:
                misfit = error
        if any_rank([misfit is not None], self._device)[0]:
            raise misfit or InvalidRequest("rank 0 refused the state", "state_mismatch")

    def _from_rank_0(self, tensors: Mapping[str, HostTensor], name: str) -> Tensor:
        """A tensor that rank 0 has, on the device of every rank."""
        parameter = name if name in self._parameters else name.rpartition(".")[0]
        value = torch.empty(self._shape(parameter), dtype=torch.float32, device=self._device)
        if dist.get_rank() == 0:
            value.copy_(torch.from_numpy(tensors[name].values().copy()))
        dist.broadcast(value, 0)
        return value
