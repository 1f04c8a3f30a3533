"""The oracle: the same operations, applied undisturbed by one engine in one process.

`python -m tests.robustness.oracle MODEL_DIR INPUT OUTPUT`: INPUT holds each model's training history,
OUTPUT gets what every request should have come to.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import safetensors.numpy

from services.common.contract.tensors import HostTensor
from tests.cluster import batches
from tests.robustness.history import Entry

MICRO_BATCH_TOKENS = 64

Expected = list[list[dict[str, Any]]]
"""Per model and request what it comes to; for a publish its weights' digest."""


def expected(
    model_dir: Path, histories: Sequence[Sequence[Entry]], threads: int, directory: Path
) -> Expected:
    """What the requests come to, found in a process of its own.

    Args:
        threads: OpenMP threads, as many as the cluster's trainer has.
    """
    source, target = directory / "oracle-in.msgpack", directory / "oracle-out.msgpack"
    source.write_bytes(
        msgspec.msgpack.encode(
            [[(entry.kind, entry.arguments, entry.refused) for entry in one] for one in histories]
        )
    )
    command = [sys.executable, "-m", "tests.robustness.oracle", str(model_dir), str(source), str(target)]
    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    environment = {**os.environ, **world, "MASTER_PORT": str(_free_port()), "OMP_NUM_THREADS": str(threads)}
    subprocess.run(command, env=environment, check=True, timeout=900, stdout=subprocess.DEVNULL)
    return msgspec.msgpack.decode(target.read_bytes())


def digest(tensors: Mapping[str, bytes]) -> str:
    """SHA-256 of tensors by their names."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        total.update(name.encode())
        total.update(tensors[name])
    return total.hexdigest()


def stored_digest(snapshot: Path) -> str:
    """`digest` of a stored snapshot's tensors, by the names that they have in the engine."""
    stored = safetensors.numpy.load_file(snapshot / "adapter_model.safetensors")
    return digest(
        {
            name.removeprefix("base_model.model.").removesuffix(".weight"): tensor.tobytes()
            for name, tensor in stored.items()
        }
    )


def _free_port() -> int:
    from tests.cluster.conftest import free_port

    return free_port()


def main() -> None:
    """Runs as the oracle's process."""
    model_dir, source, target = sys.argv[1:]
    from services.trainer.compute.engine import Engine

    engine = Engine(model_path=model_dir, device="cpu", dtype="float32", zero_stage=0)
    histories = msgspec.msgpack.decode(Path(source).read_bytes())
    results = [
        list(_apply(engine, f"oracle:train:{number}", history)) for number, history in enumerate(histories)
    ]
    Path(target).write_bytes(msgspec.msgpack.encode(results))


def _apply(engine: Any, model_id: str, history: Sequence[Any]) -> Iterator[dict[str, Any]]:
    from services.trainer.compute.data import AdamSpec, LoraSpec

    saved: dict[str, Any] = {}
    for seq_id, (kind, arguments, refused) in zip(itertools.count(), history):
        if refused:
            yield {}
        elif kind == "create":
            engine.create_model(model_id, LoraSpec(arguments["rank"], arguments["seed"]))
            yield {}
        elif kind in ("forward", "forward_backward"):
            yield _computed(engine, model_id, seq_id, arguments["data"], forward_only=kind == "forward")
        elif kind == "step":
            metrics = engine.optim_step(model_id, AdamSpec(learning_rate=arguments["learning_rate"]))
            yield {name: metrics[name] for name in ("grad_norm", "update_norm")}
        elif kind == "publish":
            adapter = engine.state(model_id, optimizer=False).adapter
            yield {"weights": digest({name: array.data for name, array in adapter.items()})}
        elif kind == "save":
            saved[arguments["name"]] = engine.state(model_id)
            yield {}
        else:
            engine.load_state(model_id, saved[arguments["name"]], optimizer=True)
            yield {}


def _computed(
    engine: Any, model_id: str, seq_id: int, data: Sequence[Sequence[int]], *, forward_only: bool
) -> dict[str, Any]:
    from services.trainer.compute.data import MicroBatch, Pass, PassOp
    from services.trainer.compute.losses import combine_metrics
    from services.trainer.order.microbatch import split_operation

    rows = [_row(index, *one) for index, one in enumerate(data)]
    cut = split_operation([row.tokens for row in rows], MICRO_BATCH_TOKENS, shared=engine.shares_prefixes)
    passes = Pass(
        [PassOp(model_id, seq_id, "cross_entropy", forward_only=forward_only)],
        [MicroBatch([rows[i] for i in unit.datums]) for unit in cut],
    )
    results = engine.run_pass(passes)
    total = hashlib.sha256()
    for result in results:
        total.update(result.outputs["logprobs"].data)
    metrics = combine_metrics("cross_entropy", [result.metrics for result in results])
    return {"loss": metrics["loss:sum"], "logprobs": total.hexdigest()}


def _row(index: int, seed: int, length: int) -> Any:
    from services.trainer.compute.data import Row

    datum = batches.cross_entropy(seed, length)
    targets = np.asarray(batches.targets(datum), dtype="<i8")
    weights = batches.field(datum, "weights").numpy().astype("<f4")
    inputs = {
        "target_tokens": HostTensor("int64", targets.shape, targets.tobytes()),
        "weights": HostTensor("float32", weights.shape, weights.tobytes()),
    }
    tokens = np.asarray(batches.inputs(datum), dtype="<i4").tobytes()
    return Row(0, index, tokens, inputs)


if __name__ == "__main__":
    main()
