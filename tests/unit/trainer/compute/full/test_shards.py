"""Tensors that are spread over ranks, as files that a world of any size reads."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from services.common.contract.errors import DataLoss, InvalidRequest
from services.trainer.compute.full import shards
from services.trainer.compute.full.shards import Part, SavedShards, ShardWriter

WHOLE = {"a": torch.arange(10.0), "b": torch.arange(7.0) - 3}
SIZES = {name: values.numel() for name, values in WHOLE.items()}


@pytest.fixture(scope="module")
def writer() -> Iterator[ShardWriter]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield ShardWriter()
    dist.destroy_process_group()


def write_file(directory: Path, name: str, parts: dict[str, tuple[int, Tensor]]) -> None:
    """A file as torch.distributed.checkpoint has a rank write it."""
    directory.mkdir(exist_ok=True)
    offsets = {tensor: {"saved_offsets": [start]} for tensor, (start, _) in parts.items()}
    tensors = {tensor: values.clone() for tensor, (_, values) in parts.items()}
    save_file(tensors, directory / name, {"DCP_SHARDING_INFO": json.dumps(offsets)})


@pytest.fixture
def of_two_ranks(tmp_path: Path) -> Path:
    directory = tmp_path / "state"
    write_file(directory, "1.safetensors", {"a": (0, WHOLE["a"][:6]), "b": (0, WHOLE["b"][:2])})
    write_file(directory, "2.safetensors", {"a": (6, WHOLE["a"][6:]), "b": (2, WHOLE["b"][2:])})
    return directory


def read(directory: Path, *cuts: int) -> Tensor:
    """The tensor "a" of a state, as so many ranks read it that it is cut at these places."""
    saved = SavedShards(str(directory))
    saved.check(SIZES)
    parts = []
    for start, end in zip((0, *cuts), (*cuts, 10), strict=True):
        parts.append(Part(torch.full((end - start,), torch.nan), start, 10))
        saved.read({"a": parts[-1]})
    return torch.cat([part.values for part in parts])


@pytest.mark.parametrize("cuts", [(), (5,), (3, 6, 9)], ids=["1 rank", "2 ranks", "4 ranks"])
def test_a_world_of_another_size_reads_what_two_ranks_wrote(
    of_two_ranks: Path, cuts: tuple[int, ...]
) -> None:
    assert torch.equal(read(of_two_ranks, *cuts), WHOLE["a"])


def test_what_is_written_is_read_also_when_it_takes_several_files(
    writer: ShardWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "_FILE_BYTES", 40)
    parts = {name: Part(values, 0, values.numel()) for name, values in WHOLE.items()}
    writer.write(lambda: parts, SIZES, str(tmp_path / "state")).result()
    files = sorted(path.name for path in (tmp_path / "state").iterdir())
    assert len(files) == 2 and all(name.endswith(".safetensors") for name in files)
    assert torch.equal(read(tmp_path / "state", 5), WHOLE["a"])


def test_parts_that_do_not_fit_together_are_not_written(writer: ShardWriter, tmp_path: Path) -> None:
    written = writer.write(lambda: {"a": Part(WHOLE["a"][:6], 5, 10)}, {"a": 10}, str(tmp_path / "state"))
    with pytest.raises(RuntimeError, match="a state was not written"):
        written.result()


def test_what_the_disk_refuses_is_told_as_such(writer: ShardWriter, tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file where the directory should be")
    with pytest.raises(OSError, match="rank 0 could not write"):
        writer.write(lambda: {"a": Part(WHOLE["a"], 0, 10)}, {"a": 10}, str(tmp_path / "state")).result()


def test_parts_come_to_the_host_on_the_thread_that_writes_them(writer: ShardWriter, tmp_path: Path) -> None:
    may_go_on, threads = threading.Event(), []

    def parts() -> dict[str, Part]:
        assert may_go_on.wait(30)
        threads.append(threading.current_thread())
        return {"a": Part(WHOLE["a"], 0, 10)}

    written = writer.write(parts, {"a": 10}, str(tmp_path / "state"))
    assert not written.done()
    may_go_on.set()
    written.result()
    assert threads and threads[0] is not threading.current_thread()


def test_all_ranks_are_told_of_parts_that_did_not_come_to_the_host(
    writer: ShardWriter, tmp_path: Path
) -> None:
    def parts() -> dict[str, Part]:
        raise torch.OutOfMemoryError("no memory")

    with pytest.raises(RuntimeError, match="a state was not written"):
        writer.write(parts, {"a": 10}, str(tmp_path / "state")).result()


@pytest.mark.parametrize("file", ["1.safetensors", "2.safetensors"])
def test_a_state_that_lacks_a_file_is_not_loaded(of_two_ranks: Path, file: str) -> None:
    (of_two_ranks / file).unlink()
    with pytest.raises((DataLoss, InvalidRequest)):
        SavedShards(str(of_two_ranks)).check(SIZES)


def test_a_damaged_file_is_told(of_two_ranks: Path) -> None:
    path = of_two_ranks / "2.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataLoss, match="state is damaged"):
        SavedShards(str(of_two_ranks))


@pytest.mark.parametrize(
    "info",
    [
        "{",
        "[]",
        "3",
        "{}",
        '{"a": []}',
        '{"a": {"saved_offsets": null}}',
        '{"a": {"saved_offsets": ["0"]}}',
        '{"a": {"saved_offsets": [0.5]}}',
        '{"a": {"saved_offsets": []}}',
        '{"a": {"saved_offsets": [-1]}}',
        '{"a": {"saved_offsets": [99999999999999999999]}}',
    ],
)
def test_whatever_a_file_says_of_its_parts_is_read_or_told_as_damage(tmp_path: Path, info: str) -> None:
    save_file({"a": WHOLE["a"]}, tmp_path / "1.safetensors", {"DCP_SHARDING_INFO": info})
    with pytest.raises(DataLoss):
        SavedShards(str(tmp_path))


@pytest.mark.parametrize("values", [torch.tensor(1.0), WHOLE["a"].view(10, 1)], ids=["scalar", "matrix"])
def test_a_part_that_is_not_flat_is_told(tmp_path: Path, values: Tensor) -> None:
    info = json.dumps({"a": {"saved_offsets": [0] * min(values.dim(), 1)}})
    save_file({"a": values}, tmp_path / "1.safetensors", {"DCP_SHARDING_INFO": info})
    with pytest.raises(DataLoss):
        SavedShards(str(tmp_path))


def test_parts_of_several_types_are_told(of_two_ranks: Path) -> None:
    write_file(of_two_ranks, "2.safetensors", {"a": (6, WHOLE["a"][6:].half()), "b": (2, WHOLE["b"][2:])})
    with pytest.raises(DataLoss, match="a has parts of several types"):
        SavedShards(str(of_two_ranks))


@pytest.mark.parametrize("sizes", [{"a": 10}, {"a": 10, "b": 8}, {"a": 10, "b": 7, "c": 1}])
def test_a_state_of_another_shape_is_refused(of_two_ranks: Path, sizes: dict[str, int]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        SavedShards(str(of_two_ranks)).check(sizes)
    assert refused.value.code == "state_mismatch"
