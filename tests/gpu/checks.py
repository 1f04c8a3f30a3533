"""What is checked of the engine on a device. On a CPU the same code takes the CPU's own paths."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bench.gpu import exactness
from bench.gpu.engine import one_micro_batch, start
from services.common import weights
from services.common.process import failpoints
from services.common.weights import base, side_streams
from services.common.weights.gloo import GlooGroup
from services.common.weights.nccl import NcclGroup
from services.launcher.tiny_model import make_tiny_model
from services.trainer.compute.data import LoraSpec, ModelState, RowResult, ShardedState
from services.trainer.compute.engine import Engine
from services.trainer.compute.full.model import FullModel
from services.trainer.compute.full.shards import SavedShards
from services.trainer.compute.memory.capacity import PROCESS_BYTES, head_bytes
from services.trainer.compute.memory.dry_run import find_capacity, peak_of_cuda
from services.trainer.compute.memory.failures import NoMemory
from services.trainer.files.export_format import adapter_files, read_adapter
from services.trainer.publish.cargo import on_host, whole_model
from tests.component.engine.data import ADAM, LORA, NO_CLIP, VOCAB, ce_row, flat, op, trained_model, work
from tests.component.engine.reference import ReferenceModel
from tests.gpu import hybrids, pieces, sinks

MEMORY = 640 << 20
CONTEXT = 8192


def small_model(directory: Path) -> Path:
    """Whose heads are of a size that FlashAttention takes."""
    return make_tiny_model(
        directory, vocab=VOCAB, layers=2, hidden=256, heads=4, intermediate=512, context=CONTEXT
    )


def exact(device: str, directory: Path, dtype: str) -> None:
    """Log-probabilities and gradients beside transformers with PEFT."""
    vocab = 4096 if device == "cuda" else 512
    found = exactness.errors(exactness.model_for(device, directory), device, dtype, vocab)
    if dtype == "float32":
        assert found["logprobs"] <= exactness.LOGPROBS
        assert found["gradient"] <= exactness.GRADIENT
    else:
        assert found["logprobs"] <= exactness.FACTOR * found["plain_logprobs"]
        assert found["gradient"] <= exactness.FACTOR * found["plain_gradient"]


def checkpointed(device: str, directory: Path) -> None:
    """With activations that are computed again a model trains to the same, also where there is room to keep
    those of some blocks or of all."""
    small_model(directory)
    trained = []
    for blocks in (None, 0, 1, 2):
        engine = start(directory, device, "float32", checkpointing=blocks is not None)
        trained_model(engine, "m")
        tokens, of = 20 + 70, engine.footprint
        taken = int(tokens * (of.token + (blocks or 0) * of.block)) + head_bytes(tokens, engine.vocab_size)
        if blocks is not None:
            engine.keep_blocks(0)
            kept = engine._rounds._kept
            assert kept is not None and kept._room() > 0
            # In a room that has no place for half a block more.
            room = int((taken + tokens * of.block / 2 + PROCESS_BYTES) * 8 / 7)
            kept._room = lambda room=room: room  # type: ignore[misc]
        _run(engine, work((op("m"), [ce_row(1, 20), ce_row(2, 70)])))
        assert engine._rounds.kept_bytes == (0 if blocks is None else taken)
        engine.optim_step("m", ADAM)
        trained.append(flat(engine.state("m")))
    for state in trained[1:]:
        np.testing.assert_allclose(state, trained[0], rtol=1e-5, atol=1e-6)


def shared(device: str, directory: Path) -> None:
    """Answers to one prompt train to the same whether it is computed once or for each of them."""
    engine = start(small_model(directory), device, "bfloat16")
    assert engine.shares_prefixes
    rng = np.random.default_rng(9)
    prompt = rng.integers(0, VOCAB, 48)
    sequences = [np.concatenate([prompt, rng.integers(0, VOCAB, length)]) for length in (20, 33, 7)]
    found = []
    for shares in (True, False):
        engine._rounds.shares_prefixes = shares
        before = trained_model(engine, "m")
        results = _run(engine, one_micro_batch(["m"], sequences))
        logprobs = np.concatenate([result.outputs["logprobs"].values() for result in results])
        found.append((logprobs, exactness._gradient(engine, "m", before)))
        engine.drop_model("m")
    for one, other in zip(*found, strict=True):
        assert np.linalg.norm(one - other) <= 2e-2 * np.linalg.norm(other)


def capacity(device: str, directory: Path) -> None:
    """What is announced of a given memory is computed within it, also where blocks keep their activations as
    far as there is room."""
    gc.collect()
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    engine = start(small_model(directory), device, "bfloat16")
    found = find_capacity(engine, MEMORY, 2048, keeps_blocks=True)
    tokens = min(found.one_rank_tokens, CONTEXT if device == "cuda" else 256)
    assert tokens >= 128
    engine.create_model("m", LORA)
    sequence = np.random.default_rng(1).integers(0, VOCAB, tokens)

    def run() -> None:
        _run(engine, one_micro_batch(["m"], [sequence]))

    if device == "cuda":
        assert peak_of_cuda(run) - before <= MEMORY
    else:
        run()


def out_of_memory(device: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A micro-batch that is refused memory runs in parts and comes to the same."""
    engine = start(small_model(directory), device, "float32")
    score, refused = engine._base.score, []

    def limited(tokens: Tensor, *rest: Any) -> Any:
        if tokens.shape[1] > 40:
            refused.append(tokens.shape[1])
            raise torch.OutOfMemoryError("no memory")
        return score(tokens, *rest)

    trained = []
    for answer in (score, limited):
        monkeypatch.setattr(engine._base, "score", answer)
        trained_model(engine, "m")
        _run(engine, work((op("m"), [ce_row(1, 30), ce_row(2, 25), ce_row(3, 40)])))
        engine.optim_step("m", NO_CLIP)
        trained.append(flat(engine.state("m")))
        engine.drop_model("m")
    assert refused
    np.testing.assert_allclose(trained[1], trained[0], rtol=1e-4, atol=1e-5)


def optimizer(device: str, directory: Path) -> None:
    """Steps end where torch's AdamW ends on the CPU."""
    engine = start(small_model(directory), device, "float32")
    reference = ReferenceModel(directory, trained_model(engine, "m").adapter)
    for step in range(2):
        rows = [ce_row(10 * step + seed, length) for seed, length in enumerate((20, 7, 65))]
        _run(engine, work((op("m", step + 1), rows)))
        norm = reference.step(rows, "cross_entropy", ADAM)
        assert engine.optim_step("m", ADAM)["grad_norm"] == pytest.approx(norm, rel=1e-4)
        reference.assert_same_adapter(engine.state("m").adapter)


def saved(device: str, directory: Path) -> None:
    """A model goes on from its saved state bit for bit, and what is exported is what it has."""
    engine = start(small_model(directory / "model"), device, "float32")
    trained_model(engine, "m")
    _run(engine, work((op("m"), [ce_row(1, 20)])))
    engine.optim_step("m", ADAM)
    state = engine.state("m")
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=ModelState)
    assert read.step == 1 and read.lora is not None
    engine.create_model("resumed", read.lora)
    engine.load_state("resumed", read, optimizer=True)
    assert engine.state("resumed") == state
    exported = directory / "export"
    exported.mkdir()
    for name, write in adapter_files("base", read.lora, state.adapter).items():
        write(exported / name)
    assert read_adapter(exported) == state.adapter


def sent(device: str, directory: Path) -> None:
    """What is sent of a full model out of the device's memory has the host's bytes and their checksum; where
    that has no room for a copy, it comes to the host, and what it was stays what it was."""
    engine = start(small_model(directory), device, "bfloat16")
    engine.create_model("full", None)
    tenant = engine._tenants["full"]
    assert isinstance(tenant, FullModel)
    for beside in (0, 2**62):
        expected = {name: weight.detach().to("cpu", copy=True) for name, weight in tenant._parameters.items()}
        engine.pass_room = beside
        snapshot = engine.snapshot("full", optimizer=False)
        with torch.no_grad():
            for weight in tenant._parameters.values():
                weight.add_(1)
        state, cargo = snapshot.unload(whole_model)
        assert (cargo is None) == (device != "cpu" and beside > 0)
        stored = on_host(state.adapter)
        assert all(torch.equal(stored[name], weight) for name, weight in expected.items())
        packed, specs = weights.pack(expected)
        for found in [whole_model(stored)] if cargo is None else [whole_model(stored), cargo]:
            assert (found.checksum, found.specs) == (weights.checksum(packed), specs)
            with pytest.MonkeyPatch.context() as small:
                small.setattr(base, "BUCKET_BYTES", 100_000)
                stream = torch.cat([bucket.to("cpu", copy=True) for bucket in found.buckets()])
            assert torch.equal(stream, packed)


def group(device: str, directory: Path) -> None:
    """A weight group, here of the sender alone, takes what it sends from where it is, and nothing more once
    it was given up; the process goes on."""
    del directory
    store, sent = dist.HashStore(), torch.arange(1000, device=device).view(torch.uint8)
    made: weights.WeightGroup
    if device == "cpu":
        made = GlooGroup(store, 1, 0, 1, 60)
    else:
        made = NcclGroup(store, 1, 0, 1, torch.device(device, torch.cuda.current_device()), 60)
    made.greet(60)
    for _ in range(2):
        made.broadcast_buckets([sent], 60)
    made.abort()
    with pytest.raises(RuntimeError, match="given up"):
        made.broadcast_buckets([sent], 60)
    assert torch.equal(sent.cpu().view(torch.int64), torch.arange(1000))


def fetched(device: str, directory: Path) -> None:
    """What a medium takes from the host is the device's, and the copies, one after the other, have one stream
    between them."""
    del directory
    values = torch.arange(1000, device=device)
    for number in range(40):
        values.fill_(number)
        if device != "cpu":
            torch.cuda.synchronize()
        assert torch.equal(base.on_host(values), torch.full((1000,), number))
        if not number:
            before = [*side_streams._unused.get(values.device, [])]
    assert side_streams._unused.get(values.device, []) == before
    assert len(before) >= (device != "cpu")


def written(device: str, directory: Path) -> None:
    """What is written of a full model is what its masters and moments were, also where a copy of them has no
    room on the device, and though it is changed before that copy is on the host; and they are that again once
    it is loaded."""
    engine = start(small_model(directory / "model"), device, "bfloat16")
    engine.create_model("full", None)
    tenant = engine._tenants["full"]
    assert isinstance(tenant, FullModel)
    _run(engine, work((op("full", 1), [ce_row(1, 20)])))
    engine.optim_step("full", ADAM)
    for beside in (0, 2**62):
        engine.pass_room = beside
        held = dict(tenant._parts(moments=True))
        expected = {name: part.values.detach().to("cpu", copy=True) for name, part in held.items()}
        to = directory / str(beside)
        to.mkdir()
        writing = engine.write_state("full", str(to))
        with torch.no_grad():
            for part in held.values():
                part.values.add_(1)
        writing.done.result()
        assert writing.step == 1 and len(expected) == 3 * len(tenant._parameters)
        read = {name: part._replace(values=torch.empty_like(expected[name])) for name, part in held.items()}
        SavedShards(str(to)).read(read)
        assert all(torch.equal(read[name].values, values) for name, values in expected.items())
        engine.load_state("full", ShardedState(str(to), writing.step), optimizer=True)
        assert all(torch.equal(held[name].values.cpu(), values) for name, values in expected.items())
        for name, weight in tenant._parameters.items():
            assert torch.equal(weight.cpu().flatten(), expected[name].to(weight.dtype))


def dropped(device: str, directory: Path) -> None:
    """A full model that steps on the host goes on after a dropped gradient as if that had never been."""
    engine = start(small_model(directory), device, "bfloat16", offload=True)
    found = []
    for drops in (False, True):
        engine.create_model("full", None)
        if drops:
            _run(engine, work((op("full", 1), [ce_row(1, 20)])))
            engine._tenants["full"].clear_gradient()
        _run(engine, work((op("full", 2), [ce_row(2, 20)])))
        found.append(engine.optim_step("full", ADAM))
        engine.drop_model("full")
    assert found[0] == found[1]


def away(device: str, directory: Path) -> None:
    """An adapter that was on the host goes on bit for bit, with its pending gradient, and took nothing of the
    device."""
    engine = start(small_model(directory), device, "bfloat16")
    for name in ("travels", "stays"):
        trained_model(engine, name)
        for seq_id in (1, 2):
            _run(engine, work((op(name, seq_id), [ce_row(seq_id, 20)])))
            if seq_id == 1:
                engine.optim_step(name, ADAM)
    on_host = engine.sizes.adapter_on_host(LORA)
    before = torch.cuda.memory_allocated() if device != "cpu" else on_host
    assert engine.move_adapter("travels", to_host=True)
    after = torch.cuda.memory_allocated() if device != "cpu" else 0
    assert before - after >= on_host
    assert device == "cpu" or torch.cuda.host_memory_stats()["active_bytes.current"] >= on_host
    # What takes its place on the device meanwhile.
    scratch = torch.full((on_host,), 255, dtype=torch.uint8, device=device)
    del scratch
    assert engine.move_adapter("travels", to_host=False)
    assert engine.optim_step("travels", ADAM) == engine.optim_step("stays", ADAM)
    assert engine.state("travels") == engine.state("stays")


def lacking(device: str, directory: Path) -> None:
    """A step for which the device has no memory is refused and changes nothing, and is taken once it has."""
    engine, lora = start(small_model(directory), device, "bfloat16"), LoraSpec(128, seed=1)
    for name in ("waits", "goes"):
        engine.create_model(name, lora)
        _run(engine, work((op(name), [ce_row(1, 20)])))
    before = engine.state("waits")
    with _full(device), pytest.raises(NoMemory):
        engine.optim_step("waits", ADAM)
    assert engine.state("waits") == before
    assert engine.optim_step("waits", ADAM) == engine.optim_step("goes", ADAM)
    assert engine.state("waits") == engine.state("goes") != before


@contextmanager
def _full(device: str) -> Iterator[None]:
    """Within it a device has no mebibyte left for this process. Of a CPU a step is told so."""
    if device == "cpu":
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(failpoints, "hit", _refuse_a_step)
            yield
        return
    before, held = torch.cuda.get_per_process_memory_fraction(), []
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / torch.cuda.mem_get_info()[1])
    try:
        for size in (64 << 20, 8 << 20, 1 << 20):
            with suppress(torch.OutOfMemoryError):
                while True:
                    held.append(torch.empty(size, dtype=torch.uint8, device=device))
        yield
    finally:
        held.clear()
        torch.cuda.set_per_process_memory_fraction(before)


def _refuse_a_step(point: str) -> None:
    if point == "trainer.before_step_memory":
        raise torch.OutOfMemoryError("no memory")


def _run(engine: Engine, given: Any) -> list[RowResult]:
    results = engine.run_pass(given)
    assert [result.failure for result in results] == [None] * len(results)
    return results


ALONE: dict[str, Callable[[str, Path], None]] = {
    "checkpointing changes no number": checkpointed,
    "fused norms are norms": pieces.norms,
    "fused rotations are rotations": pieces.rotations,
    "trees are attended to": pieces.trees,
    "sinks are attended to": sinks.attended,
    "GPT-OSS goes by the kernel": sinks.gpt_oss,
    "linear attention keeps to its sequences": hybrids.linear_attention,
    "a prompt is computed once": shared,
    "parts step as the whole does": pieces.parts,
    "what is announced fits": capacity,
    "what is sent is what was taken": sent,
    "a weight group carries until it is given up": group,
    "copies for the host share a stream": fetched,
    "what is written is what was taken": written,
    "a dropped gradient is gone": dropped,
    "an adapter comes back from the host as it was": away,
    "steps are those of torch's AdamW": optimizer,
    "a step that lacks memory changes nothing": lacking,
    "a saved model goes on, and its export is its own": saved,
}
"""Checks that need a directory and nothing else."""
