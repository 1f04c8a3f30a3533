"""Tensors that are spread over the ranks, as files: each rank writes what it has, and reads what it needs.

The files are those of torch.distributed.checkpoint's safetensors storage. Tensors are flat in them, and each
file says where in a tensor its part begins, so a world of any size reads what another one wrote.

Invariants: what is read was there before as a whole, each element once, or nothing of it is used; the files
hold tensors and JSON only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from services.common.contract.errors import DataLoss, InvalidRequest
from services.common.process.threads import WorkerThread

_FILE_BYTES = 2**30
"""Of the whole tensors that one file of each rank has parts of: those parts are in memory twice meanwhile."""


_APART = timedelta(hours=1)
"""How much longer than another rank one may take to write its part."""


class Part(NamedTuple):
    """A rank's part of a tensor.

    Attributes:
        values: float32 [n], n > 0, flat.
        start: where it begins.
        whole: elements of the tensor.
    """

    values: Tensor
    start: int
    whole: int

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """In the terms of torch."""
        return ChunkStorageMetadata(torch.Size([self.start]), torch.Size([self.values.numel()]))


class Writing(NamedTuple):
    """A state that is being written.

    Attributes:
        step: optimizer steps taken.
        nbytes: of this rank's part.
        done: when all ranks have written theirs. Raises OSError when a rank could not write; any other
            exception when the ranks lost each other.
    """

    step: int
    nbytes: int
    done: Future[None]


class ShardWriter:
    """Writes states beside the work, one after the other. Made, and used, on all ranks alike."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo", timeout=_APART)
        self._thread = WorkerThread("states")

    def write(
        self, parts: Callable[[], Mapping[str, Part]], sizes: Mapping[str, int], directory: str
    ) -> Future[None]:
        """Has this rank's parts written; what `Writing.done` is.

        Args:
            parts: gives them where they are written, beside the work: on the host, changed by nobody.
            sizes: elements of every tensor, those that this rank has nothing of included.
            directory: new, and the same on all ranks.
        """
        return self._thread.submit(lambda: self._write(parts, sizes, directory))

    def _write(
        self, parts: Callable[[], Mapping[str, Part]], sizes: Mapping[str, int], directory: str
    ) -> None:
        writer = dcp.HuggingFaceStorageWriter(directory, _files(sizes), save_distributed=True)
        # They are on the host: nothing is to be copied ahead of the writing, for which torch would begin to
        # use the first GPU on this thread, whichever is the rank's.
        writer.per_thread_copy_ahead = 0
        try:
            dcp.save({}, storage_writer=writer, planner=_SavePlanner(parts), process_group=self._group)
        except dcp.CheckpointException as error:
            for rank, (cause, _) in error.failures.items():
                if isinstance(cause, OSError):
                    raise OSError(cause.errno, f"rank {rank} could not write a state: {cause}") from error
            # What torch raises is no Exception.
            raise RuntimeError(f"a state was not written: {error}") from error


class SavedShards:
    """What is saved in a directory. Any rank may use it alone.

    Raises:
        DataLoss: it is incomplete or damaged.
    """

    def __init__(self, directory: str) -> None:
        self._reader = dcp.HuggingFaceStorageReader(directory)
        name = Path(directory).name
        try:
            self._metadata = self._reader.read_metadata()
        except Exception as error:
            # torch looks into a damaged file as if it were whole, so what that raises has any type; and a
            # rank that raised another one than the others expect would not meet them.
            raise DataLoss(
                f"the saved state in {name} is damaged: {type(error).__name__}: {error}"
            ) from error
        # What torch says of a tensor's type is that of the part it came to first.
        types: dict[str, set[torch.dtype]] = {}
        for index, part in self._metadata.storage_data.items():
            types.setdefault(index.fqn, set()).add(part.dtype)
        for tensor, saved in self._tensors.items():
            if not _is_whole(saved):
                raise DataLoss(f"the saved state in {name} is incomplete: of {tensor} a part is missing")
            if len(types.get(tensor, ())) > 1:
                raise DataLoss(f"the saved state in {name} is damaged: {tensor} has parts of several types")

    def check(self, sizes: Mapping[str, int]) -> None:
        """Refuses what is not of these float32 tensors.

        Args:
            sizes: elements of each tensor.

        Raises:
            InvalidRequest: a tensor is missing, too many, or of another type or size.
        """
        if self._tensors.keys() != sizes.keys():
            raise InvalidRequest(
                "the saved state has other tensors than this model; create the model from the state instead",
                "state_mismatch",
            )
        for name, saved in self._tensors.items():
            if saved.properties.dtype != torch.float32 or saved.size != torch.Size([sizes[name]]):
                raise InvalidRequest(
                    f"the saved state has {saved.size.numel()} elements of {saved.properties.dtype} for "
                    f"{name} where this model has {sizes[name]} of float32; create the model from the state "
                    "instead",
                    "state_mismatch",
                )

    def read(self, parts: Mapping[str, Part]) -> None:
        """Fills these parts of what is saved, wherever they are in memory."""
        planner = _LoadPlanner(parts)
        planner.set_up_planner({}, self._metadata, True)
        self._reader.set_up_storage_reader(self._metadata, True)
        self._reader.read_data(planner.create_local_plan(), planner).wait()

    @property
    def _tensors(self) -> dict[str, TensorStorageMetadata]:
        return self._metadata.state_dict_metadata  # type: ignore[return-value]


class _SavePlanner(dcp.DefaultSavePlanner):
    def __init__(self, parts: Callable[[], Mapping[str, Part]]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._take = parts
        self._parts: Mapping[str, Part] = {}

    def create_local_plan(self) -> SavePlan:
        # Of what fails here all ranks are told.
        self._parts = self._take()
        self.plan = SavePlan([_write_item(name, part) for name, part in self._parts.items()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._parts[index.fqn].values


class _LoadPlanner(dcp.DefaultLoadPlanner):
    def __init__(self, parts: Mapping[str, Part]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._parts = parts

    def create_local_plan(self) -> LoadPlan:
        assert isinstance(self.metadata, Metadata)
        items = []
        for name, part in self._parts.items():
            saved = self.metadata.state_dict_metadata[name]
            assert isinstance(saved, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(name, saved, [part.chunk])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._parts[index.fqn].values


def _write_item(name: str, part: Part) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(name, part.chunk.offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=part.chunk,
            properties=TensorProperties.create_from_tensor(part.values),
            size=torch.Size([part.whole]),
        ),
    )


def _files(sizes: Mapping[str, int]) -> dict[str, int]:
    """Number of the file that each tensor is in, from 1."""
    numbers, number, size = {}, 1, 0
    for name, elements in sizes.items():
        if size and size + 4 * elements > _FILE_BYTES:
            number, size = number + 1, 0
        numbers[name] = number
        size += 4 * elements
    return numbers


def _is_whole(saved: TensorStorageMetadata) -> bool:
    """Whether its parts are flat and follow each other without a gap, from the first element on."""
    if any(len(chunk.offsets) != 1 or len(chunk.sizes) != 1 for chunk in saved.chunks):
        return False
    end = 0
    for chunk in sorted(saved.chunks, key=lambda chunk: chunk.offsets[0]):
        if chunk.offsets[0] != end:
            return False
        end += chunk.sizes[0]
    return True
