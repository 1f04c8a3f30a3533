"""One trainer, put together from its parts.

Invariant: every store, queue and writer of rank 0 is made here, once.
"""

from __future__ import annotations

import redis.asyncio
import torch

from services.common.process.crashes import CrashLedger
from services.common.state.journal import Journal
from services.common.storage.data_dir import DataDir
from services.common.storage.location import connect
from services.common.tls.wires import Identity
from services.trainer.compute.engine import Engine
from services.trainer.compute.memory.capacity import Capacity
from services.trainer.compute.memory.machine import OF_COPIES, OF_LOADS, OF_RESULTS, of_machine
from services.trainer.config import TrainerConfig
from services.trainer.convert import Target
from services.trainer.execution.control_ops import ControlOps
from services.trainer.execution.executor import Executor
from services.trainer.execution.residency import Residency, Restores
from services.trainer.execution.resident_models import Model
from services.trainer.execution.states import States
from services.trainer.files.base import Base
from services.trainer.files.checkpoints import CheckpointStore
from services.trainer.files.copy_room import CopyRoom, LoadRoom
from services.trainer.files.kept_results import ResultRoom
from services.trainer.files.volume import Volume
from services.trainer.order.scheduler import Limits
from services.trainer.publish.broadcast import Broadcaster
from services.trainer.publish.publisher import Publisher
from services.trainer.service import TrainerServicer
from services.trainer.world.shortage import Shortage
from services.trainer.world.world import World


class Trainer:
    """Rank 0's parts.

    Attributes:
        models: those in memory.
        executor: runs what the scheduler decides.
        states: copies of their states.
        residency: which models are in memory, and their durable snapshots.
        broadcaster: sends weights to samplers.
        copies: what copies of models on their way out take of the host; `loads`: what states on their way in
            take; `results`: what results take.
        crashes: what was executing when a predecessor died.
        shortage: the memory that one lacked; `micro_batch_tokens` follow from it.
        servicer: what gateways call.
    """

    def __init__(
        self,
        config: TrainerConfig,
        world: World,
        client: redis.asyncio.Redis,
        engine: Engine,
        capacity: Capacity,
        who: Identity | None,
    ) -> None:
        """Puts everything together over one Redis. Call within the event loop that will run it.

        Args:
            engine: rank 0's, which is only asked what does not change.
            capacity: what the world can hold.
            who: this trainer, to samplers; None: they are called in the clear.
        """
        data = DataDir(config.data_dir)
        base = Base(config.base_model, config.model_path, engine.head_name)
        self.models: dict[str, Model] = {}
        models, journal = self.models, Journal(client)

        # What is kept: models in memory, their snapshots on disk, the ledger of crashes.
        self.shortage = Shortage(data.run, config.id)
        self.crashes = CrashLedger[tuple[str, int]](
            data.run / f"{config.id}.executing", tuple[str, int], "trainer", died_of=self.shortage.cause()
        )
        self.shortage.heard()
        self.micro_batch_tokens = self.shortage.tokens(config.micro_batch_tokens)
        staging = data.staging / config.id
        volume = Volume(data)
        self.states = States(world, base, volume, staging)
        self.loads = LoadRoom(of_machine(OF_LOADS), engine.sizes.loaded)
        self.residency = Residency(
            world,
            models,
            self.states,
            data,
            staging,
            journal,
            config.max_full_models,
            capacity.adapter_bytes,
            engine.sizes.adapter,
            capacity.adapter_host_bytes,
            engine.sizes.adapter_on_host,
            Restores(self.crashes, self.loads),
        )
        storage = connect(config.checkpoint_store, data)
        if config.checkpoint_store:
            checkpoints = CheckpointStore(storage, base, staging)
        else:
            checkpoints = CheckpointStore(storage, base, staging, volume.check)

        # What sends weights to samplers.
        self.broadcaster = Broadcaster(
            client,
            config.redis_url,
            config.base_model,
            engine.device,
            getattr(torch, config.dtype),
            who,
        )

        # What executes operations, and keeps what they came to.
        self.results = ResultRoom(
            of_machine(OF_RESULTS),
            lambda: {name: model.sequence for name, model in models.items()},
            journal.lowest_pending,
        )
        self.copies = CopyRoom(of_machine(OF_COPIES), engine.sizes.copy)
        control = ControlOps(
            world,
            checkpoints,
            Publisher(data, base, self.broadcaster),
            base,
            self.states,
            self.residency.durable.changed,
            self.residency.durable.pointer,
            self.residency.full,
            self.residency.adapters,
            self.copies,
            self.loads,
            config.full_snapshot_steps,
        )
        self.executor = Executor(
            world,
            models,
            control,
            Target(
                config.base_model,
                self.micro_batch_tokens,
                engine.shares_prefixes,
                engine.splits,
                capacity.split_beyond,
                engine.routing,
            ),
            Limits(engine.world_size, self.micro_batch_tokens),
            self.crashes,
        )
        self.servicer = TrainerServicer(
            self.executor,
            self.residency,
            models,
            engine,
            config.zero_stage,
            config.micro_batch_tokens,
            capacity,
        )
