"""How a trainer's ranks share weights under ZeRO-3, beyond sharding them, and when that can be. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sharding:
    """Settings of ZeRO-3.

    Attributes:
        replica_ranks: ranks in a row that hold all weights once more among themselves, and gather them from
            each other (DeepSpeed's hpZ); 1 = none do.
        prefetch_elements: elements of weights that are gathered before they are needed; None = as many as
            DeepSpeed takes.
        quantized_base: the frozen base's shards are held and gathered as int8.
    """

    replica_ranks: int = 1
    prefetch_elements: int | None = None
    quantized_base: bool = False


def mistakes(sharding: Sharding, zero_stage: int, ranks: int | None = None) -> list[str]:
    """What cannot be of these settings: sentences that say what to change.

    Args:
        ranks: of the trainer; None = not known yet.
    """
    size = sharding.replica_ranks
    given = {
        f"--zero-replica-ranks {size}": size != 1,
        f"--zero-prefetch-elements {sharding.prefetch_elements}": sharding.prefetch_elements is not None,
        "--zero-quantized-base yes": sharding.quantized_base,
    }
    if zero_stage != 3:
        return [
            f"{flag} says how ZeRO-3 shares weights, and the ZeRO stage is {zero_stage}: give --zero-stage 3"
            for flag in given
            if given[flag]
        ]
    if size == 1 or ranks is None or (size < ranks and ranks % size == 0):
        return []
    return [
        f"--zero-replica-ranks {size}: a trainer of {ranks} ranks is to be cut into several groups of so "
        f"many; give {_choices(ranks)}"
    ]


def _choices(ranks: int) -> str:
    found = [str(size) for size in range(1, ranks) if ranks % size == 0]
    return " or ".join(found) if found else "1"
