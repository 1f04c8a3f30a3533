"""The frozen base model under DeepSpeed. Everything that knows DeepSpeed's insides is here.

Invariant: no parameter of the base model ever requires a gradient. Under ZeRO-3 every rank must call
`score` equally often and with the same `torch.is_grad_enabled()`, because the hooks gather weights by
collectives; `collective` says so.

A frozen base has neither gradients nor optimizer state, which is what ZeRO stages 1 and 2 shard: they are
accepted and equal stage 0 (every rank holds the weights). Stage 3 shards the weights.
"""

from __future__ import annotations

import fcntl
import logging
import os
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from services.common.contract.errors import InvalidRequest
from services.common.process.memory import allocator
from services.common.weights.rendezvous import meeting_store, tcp_store
from services.common.worlds.sharding import Sharding
from services.trainer.compute.attention import FLAT_ATTENTION, Sequences, is_flat, register
from services.trainer.compute.blocks.checkpointing import checkpoint_blocks
from services.trainer.compute.exchange import COLLECTIVE_TIMEOUT, meet_when_read, wait_alike
from services.trainer.compute.kernels.norms import fuse_norms
from services.trainer.compute.kernels.rotations import fuse_rotations
from services.trainer.compute.logprobs import LogprobHead, Targets
from services.trainer.compute.lora.grouped import LoraRouter
from services.trainer.compute.lora.targets import find_linears, find_unadapted, head_name, hook_adapters
from services.trainer.compute.memory.capacity import Footprint, footprint
from services.trainer.compute.model_files.dequantized import in_one_type, whole_blocks
from services.trainer.compute.model_files.text_model import check_whole, text_model
from services.trainer.compute.recurrent.layers import begin_anew
from services.trainer.compute.replay.routers import Replay
from services.trainer.compute.sharding import quantized
from services.trainer.compute.sharding.loading import reading_own_parts
from services.trainer.compute.sharding.stage3 import (
    EVERY_ENGINE,
    gather_what_is_read,
    held_bytes,
    share_replicas,
    stage3,
    with_exact_buffers,
)
from services.trainer.compute.split.asked import splits
from services.trainer.compute.split.exchange import Exchange
from services.trainer.compute.trial.handed_on import hands_on
from services.trainer.compute.trial.own_forward import check_own_forward
from services.trainer.compute.trial.sinks import with_sinks

logger = logging.getLogger(__name__)


def init_distributed(device: str) -> None:
    """Joins the process group that the environment describes, as torchrun's agent does, unless done before.

    Args:
        device: "cpu" (gloo) or "cuda" (NCCL, on the GPU of LOCAL_RANK).

    Raises:
        InvalidRequest: there is no GPU for this rank.
    """
    # Read when deepspeed is first imported; otherwise a machine with a GPU would always use it.
    os.environ.setdefault("DS_ACCELERATOR", device)
    import deepspeed
    from deepspeed.utils import groups

    if device == "cuda":
        local_rank, visible = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        # Where there is none at all, as while a driver is away, torch's own error is no refusal.
        if 0 < visible <= local_rank:
            raise InvalidRequest(
                f"{local_rank + 1} ranks need as many GPUs, and {visible} are visible here: start fewer, or "
                "name more GPUs in CUDA_VISIBLE_DEVICES"
            )
        torch.cuda.set_device(local_rank)
    else:
        _load_collectives()
    backend = "nccl" if device == "cuda" else "gloo"
    _meet(backend)
    deepspeed.init_distributed(
        dist_backend=backend, auto_mpi_discovery=False, verbose=False, timeout=COLLECTIVE_TIMEOUT
    )
    # It reduces gradients and spreads weights in a group of its own of the same ranks.
    wait_alike(groups._get_data_parallel_group())
    if device == "cpu":
        _unlink_shared_buffer()


def _meet(backend: str) -> None:
    """Joins the process group on MASTER_ADDR, and on no other address."""
    if dist.is_initialized():
        return
    rank, world, timeout = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), COLLECTIVE_TIMEOUT
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        # The agents have met in it.
        store: dist.Store = dist.PrefixStore("ranks", meeting_store(address, port, False, timeout))
    else:
        store = tcp_store(address, port, rank, world, timeout)
    # A group that is bound to its GPU is split without a rendezvous; one rank alone has nobody to split from.
    bound = backend == "nccl" and world > 1
    device = torch.device("cuda", torch.cuda.current_device()) if bound else None
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world, timeout=timeout, device_id=device
    )


@cache
def _load_collectives() -> None:
    """Loads DeepSpeed's CPU collectives, compiling them if that was not done.

    They are in this virtual environment, where its set-up puts them, else, or where this user may not write
    there, in PyTorch's own cache.

    PyTorch keeps others away meanwhile by a file, and waits for ever for one whose process was killed.
    Whoever holds the lock below, which the kernel takes from a dead process, may take such a file away.
    """
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder
    from torch.utils.cpp_extension import _get_build_directory

    prepared = Path(sys.prefix) / "torch_extensions"
    if prepared.is_dir() and os.access(prepared, os.W_OK):
        os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(prepared))
    # Another version of ninja than the one that compiled them would find them out of date.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.prefix) / "bin"), os.environ.get("PATH", "")])
    builder = ShareMemCommBuilder()
    folder = Path(_get_build_directory(builder.name, False))
    with (folder / "in-use").open("w") as users:
        fcntl.flock(users, fcntl.LOCK_EX)
        (folder / "lock").unlink(missing_ok=True)
        # Only ninja knows whether what is there is of this environment.
        logger.info("DeepSpeed's collectives: where they have to be compiled first, that takes minutes, once")
        builder.load(verbose=False)


def _unlink_shared_buffer() -> None:
    """Takes the name off this rank's segment of shared memory (69 MB), which DeepSpeed leaves behind."""
    # Once every rank has come here all of them have mapped it.
    dist.barrier()
    world = f"{os.environ.get('MASTER_ADDR', '')}_{os.environ.get('MASTER_PORT', '')}"
    name = f"deepspeed_allreduce_buffer_{os.getuid()}_{world}_{dist.get_rank()}"
    Path("/dev/shm", name).unlink(missing_ok=True)


class BaseModel:
    """A causal language model from a local directory or hub id.

    Attributes:
        collective: forward and backward passes are collectives of the whole world.
        flat: it computes several sequences at once; else `score` takes one.
        blocks: its blocks, where they compute their activations again.
        linears: every linear an adapter may adapt, by Hugging Face name, in the model's order.
        unadapted: other weights of its blocks, which none can.
        head_name: what it calls its output head.
        elements: of its weights, over all ranks.
        vocab_size: rows of the output head.
        context_length: most tokens in a sequence.
        arch: architecture class name, for example "Qwen3ForCausalLM".
        asked: what each layer asks of attention; none where `flat` is not so.
        exchange: with which all ranks compute one sequence; None: they cannot.
        replay: its routers, which compute with experts that they are given.
        footprint: what it takes of this rank's memory, by arithmetic.
    """

    def __init__(
        self,
        model_path: str,
        *,
        device: str,
        dtype: torch.dtype,
        zero_stage: int,
        sharding: Sharding,
        router: LoraRouter,
        activation_checkpointing: bool,
    ) -> None:
        if device == "cpu":
            allocator.keep_freed_memory()
        init_distributed(device)
        import deepspeed

        ranks = dist.get_world_size()
        self._router = router
        self.device = f"cuda:{torch.cuda.current_device()}" if device == "cuda" else "cpu"
        self.collective = zero_stage == 3
        config = _deepspeed_config(zero_stage, dtype, sharding)
        model = load_model(model_path, dtype, config if self.collective else None)
        self.blocks = checkpoint_blocks(model) if activation_checkpointing else None
        self.arch = type(model).__name__
        self.flat = computes_flat(model)
        self.vocab_size = int(model.config.vocab_size)
        self.context_length = int(model.config.max_position_embeddings)
        self.linears = find_linears(model)
        self.unadapted = find_unadapted(model)
        self.head_name = head_name(model)
        hook_adapters(model, router)
        self.replay = Replay(model)
        scorer = Scorer(model, router, detached=self.collective)
        if not self.collective:
            # It spreads the first rank's weights, for which all have to be there.
            meet_when_read(sum(each.nbytes for each in model.parameters()), self.device)
        self._engine, *_ = deepspeed.initialize(model=scorer, config=config)
        if sharding.quantized_base:
            quantized.quantize_shards(scorer, ranks)
        # The engine's own call forbids a plain backward(), so the wrapped module is called.
        self._scorer = self._engine.module
        self.elements = sum(getattr(each, "ds_numel", each.numel()) for each in scorer.parameters())
        asked = check_own_forward(
            model,
            lambda *given: self._scorer(*given)[0],
            model_path=model_path,
            flat=self.flat,
            vocab_size=self.vocab_size,
            context_length=self.context_length,
            device=self.device,
        )
        self.asked = [layer.within(self.context_length) for layer in with_sinks(asked, self.device, ranks)]
        self.exchange = Exchange(ranks, self.device) if splits(self.asked, ranks) else None
        self.footprint: Footprint = footprint(
            model,
            dtype.itemsize,
            checkpointing=activation_checkpointing,
            ranks=ranks if self.collective else 1,
            asked=self.asked,
        )
        if self.collective:
            self.footprint = replace(self.footprint, weights=held_bytes(scorer))
        logger.info("loaded %s (%s, ZeRO stage %d) on %s", model_path, self.arch, zero_stage, self.device)

    def score(self, tokens: Tensor, targets: Targets, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """Log-probabilities of targets and values, differentiable in the routed adapters when gradients are
        enabled.

        Args:
            tokens: int64 [1, T], those of the sequences one after the other.
            targets: what the first P tokens predict, Q in all. The others are for the routed critics' value
                heads.

        Returns:
            float32 [Q] and float32 [T - P].
        """
        logprobs, scored = self._scorer(tokens, targets, sequences)
        return logprobs, self._router.values(scored)

    def backward(self, loss: Tensor) -> None:
        """Differentiates `loss` into the routed adapters."""
        loss.backward()
        if self.collective:
            # Weights gathered for modules whose input needed no gradient were not released by a hook.
            self._engine.optimizer.release_backward_leftovers()


class Scorer(nn.Module):
    """Backbone and log-probability head as the one module DeepSpeed manages. Value heads are its tenants'.

    Args:
        detached: differentiate from the embeddings on, whatever requires a gradient.
    """

    def __init__(self, model: Any, router: LoraRouter, *, detached: bool) -> None:
        super().__init__()
        self.backbone = model.base_model
        self.head = LogprobHead(model.get_output_embeddings(), router)
        self._detached = detached
        self._flat = computes_flat(model)

    def forward(self, tokens: Tensor, targets: Targets, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """Log-probabilities [Q], and the hidden states [T - P, hidden] of critics' tokens."""
        if not self._flat and len(sequences.lengths) > 1:
            raise RuntimeError(f"{type(self.backbone).__name__} computes one sequence at a time")
        embedded = self.backbone.get_input_embeddings()(tokens)
        if self._detached and torch.is_grad_enabled():
            # The backward pass then runs through every module on every rank, whichever adapters are
            # routed there, and so do its collectives.
            embedded = embedded.detach().requires_grad_()
        flat = {"position_ids": sequences.positions, "sequences": sequences} if self._flat else {}
        hidden = self.backbone(inputs_embeds=embedded, use_cache=False, **flat).last_hidden_state[0]
        scored = targets.positions
        predicting, valued = hidden.split([scored, hidden.shape[0] - scored])
        return self.head(predicting, targets), valued


def _deepspeed_config(zero_stage: int, dtype: torch.dtype, sharding: Sharding) -> dict[str, Any]:
    config: dict[str, Any] = {**EVERY_ENGINE, "zero_optimization": {"stage": 0}}
    if zero_stage == 3:
        settings = quantized.SETTINGS if sharding.quantized_base else {}
        config["zero_optimization"] = {**stage3(sharding), **settings}
        config["bf16"] = {"enabled": dtype == torch.bfloat16}
    return config


def load_model(
    model_path: str,
    dtype: torch.dtype,
    sharded_config: dict[str, Any] | None,
) -> Any:
    """The causal language model, without gradients and in evaluation mode (no dropout).

    Args:
        sharded_config: DeepSpeed configuration under whose ZeRO-3 each weight is sharded as it is loaded.

    Raises:
        InvalidRequest: as `text_model`; its files lack weights, or its logits are not those of a linear head
            above the rest of it.
    """
    from transformers.integrations.deepspeed import HfDeepSpeedConfig

    text = text_model(model_path, sharded=bool(sharded_config))
    if sharded_config:
        share_replicas()
        sharded_config = with_exact_buffers(sharded_config, text.config, dtype)
    flat = is_flat(text.kind, text.config) and hands_on(text.kind, text.config)
    # While this object lives, from_pretrained shards each weight as it makes it.
    sharding = HfDeepSpeedConfig(sharded_config) if sharded_config else None
    register()
    with reading_own_parts() as in_files, whole_blocks():
        model, found = text.kind.from_pretrained(
            model_path,
            config=text.config,
            dtype=dtype,
            low_cpu_mem_usage=True,
            attn_implementation=FLAT_ATTENTION if flat else None,
            key_mapping=text.names,
            # Files of PyTorch's own format would be unpickled.
            use_safetensors=True,
            output_loading_info=True,
        )
    del sharding
    check_whole(model, found["missing_keys"], found["unexpected_keys"] | in_files, model_path)
    if model.base_model is model:
        raise InvalidRequest(
            f"{model_path}: {type(model).__name__} has no part below its output head; use another model"
        )
    if not isinstance(model.get_output_embeddings(), nn.Linear):
        raise InvalidRequest(
            f"{model_path}: {type(model).__name__} has no linear output head; use another model"
        )
    model.requires_grad_(False).eval()
    in_one_type(model, dtype)
    if sharded_config:
        gather_what_is_read(model)
    if computes_flat(model):
        begin_anew(model)
    fuse_norms(model)
    fuse_rotations(model)
    return model


def computes_flat(model: Any) -> bool:
    """Whether a loaded model takes several sequences at once."""
    return bool(model.config._attn_implementation == FLAT_ATTENTION)
