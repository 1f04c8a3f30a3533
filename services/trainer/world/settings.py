"""Whether all ranks were started with the same settings.

Invariant: ranks whose settings would have them compute differently find it out before they load anything.
"""

from __future__ import annotations

import zlib

from services.common.contract.errors import InvalidRequest
from services.trainer.compute.exchange import least
from services.trainer.config import TrainerConfig

_SHARED = {
    "--model": "base_model",
    "--zero-stage": "zero_stage",
    "--zero-replica-ranks, --zero-prefetch-elements and --zero-quantized-base": "sharding",
    "--offload-optimizer": "offload_optimizer",
    "--device": "device",
    "--dtype": "dtype",
    "--micro-batch-tokens": "micro_batch_tokens",
    "--activation-checkpointing": "activation_checkpointing",
    "--activation-checkpointing auto": "keeps_blocks",
    "--max-context": "max_context",
    "--data-dir": "data_dir",
}


def check_same(config: TrainerConfig) -> None:
    """A collective of all ranks.

    Raises:
        InvalidRequest: on all ranks; a setting is not the same on each.
    """
    mine = [zlib.crc32(repr(getattr(config, name)).encode()) for name in _SHARED.values()]
    lowest = least(mine, config.device)
    highest = [-number for number in least([-number for number in mine], config.device)]
    differ = [flag for flag, low, high in zip(_SHARED, lowest, highest, strict=True) if low != high]
    if differ:
        raise InvalidRequest(
            f"{', '.join(differ)}: not the same on all ranks; start every node with the same flags and "
            "variables"
        )
