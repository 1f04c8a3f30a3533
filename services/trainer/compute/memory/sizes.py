"""What models of one base take, by arithmetic over its shapes: any rank may ask alone, of all alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from services.trainer.compute.data import LoraSpec
from services.trainer.compute.lora.adapter import HEAD, LinearShape, largest, layout_of, select_targets
from services.trainer.compute.memory.capacity import ADAPTER_MOMENTS, adapter_bytes, adapter_host_bytes


class ModelSizes:
    """Bytes of models.

    Args:
        linears, unadapted: as of `select_targets`.
        elements: of all weights of the base model.
        item: bytes of one of them.
        ranks: of the world.
        on_device: they compute on CUDA.
    """

    def __init__(
        self,
        linears: Mapping[str, LinearShape],
        unadapted: Sequence[str],
        elements: int,
        item: int,
        ranks: int,
        *,
        on_device: bool,
    ) -> None:
        self._linears, self._unadapted = linears, unadapted
        self._elements, self._item, self._ranks = elements, item, ranks
        self._on_device = on_device

    @property
    def base(self) -> int:
        """What all weights of the base model take, and about so much their files."""
        return self._elements * self._item

    def adapter(self, spec: LoraSpec) -> int:
        """What an adapter takes of each rank.

        Raises:
            InvalidRequest: the base model has nothing of what it should train.
        """
        return adapter_bytes(*self._shape(spec), self._item, self._ranks)

    def adapter_on_host(self, spec: LoraSpec) -> int:
        """What it takes of each rank's host at most while it is there; else as `adapter`."""
        return adapter_host_bytes(*self._shape(spec), self._item, self._ranks)

    def copy(self, lora: LoraSpec | None, moments: bool) -> int:
        """What a copy of a model takes of the first rank's host at most, when it is all there: page-locked
        memory, which a device's copies go to, comes in powers of two.

        Args:
            lora: None: it trains all weights. With its moments each rank writes its own part, so 0.
        """
        if lora is None:
            return 0 if moments else self.base * (2 if self._on_device else 1)
        _, elements = layout_of(*self._shape(lora))
        nbytes = 4 * elements
        each = 1 << (nbytes - 1).bit_length() if self._on_device else nbytes
        return each * (1 + ADAPTER_MOMENTS if moments else 1)

    def loaded(self, lora: LoraSpec | None) -> int:
        """What a saved state takes of the first rank's host at most while it is read, in float32: the file of
        its moments is there twice until all of them were taken out of it.

        Args:
            lora: None: it trains all weights. Each rank reads its own part, so 0.
        """
        if lora is None:
            return 0
        _, elements = layout_of(*self._shape(lora))
        return 4 * elements * (1 + 2 * ADAPTER_MOMENTS)

    def largest_adapter(self, rank: int) -> LoraSpec:
        """The adapter of this rank that trains all that adapters can."""
        return largest(self._linears, rank, self._unadapted)

    def _shape(self, spec: LoraSpec) -> tuple[dict[str, LinearShape], int, int]:
        """Its linears, its rank and the elements of its value head, 0 = none."""
        value_head = self._linears[HEAD].in_features if spec.role == "critic" else 0
        return select_targets(self._linears, spec, self._unadapted), spec.rank, value_head
