"""What vLLM does by itself with the experts of tokens, where a sampler has it do otherwise; as
test_still_needed.py. All of it is vLLM's own code, but for the tensor of a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.distributed.aux_output_connector import worker as vllms
from vllm.distributed.aux_output_connector.connector import (
    AuxOutputConnectorMetadata,
    AuxOutputSchedulerConnector,
    PackedBlockHashes,
)
from vllm.distributed.aux_output_connector.store import BlockObject, BlockObjectStore, BlockObjectStoreError
from vllm.model_executor.layers.fused_moe import routed_experts_capturer

pytestmark = pytest.mark.heavy

LAYERS, TOP_K, BLOCK = 3, 2, 4
SHAPE = SimpleNamespace(
    get_total_num_hidden_layers=lambda: LAYERS,
    get_num_experts=lambda: 8,
    get_num_experts_per_tok=lambda: TOP_K,
    hf_text_config=SimpleNamespace(model_type="made_up"),
)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[vllms.AuxOutputWorkerConnector]:
    """vLLM's part in the first worker of a model of which the layer in the middle alone routes."""
    monkeypatch.setattr(vllms, "bind_routed_experts_capturer", lambda *_: None)
    monkeypatch.setattr(vllms, "get_tp_group", lambda: SimpleNamespace(is_first_rank=True))
    monkeypatch.setattr(vllms, "resolve_kv_cache_block_sizes", lambda *_: (BLOCK, BLOCK))
    nobody = SimpleNamespace(dp_metadata=None)
    monkeypatch.setattr(routed_experts_capturer, "get_forward_context", lambda: nobody)
    config: Any = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=16, max_num_seqs=4),
        model_config=SHAPE,
        parallel_config=SimpleNamespace(data_parallel_rank=0, tensor_parallel_size=1),
        aux_output_config=SimpleNamespace(max_bytes=None),
        max_concurrent_batches=2,
    )
    blocks: Any = SimpleNamespace(num_blocks=8)
    made = vllms.AuxOutputWorkerConnector(vllm_config=config, model=torch.nn.Module(), kv_cache_config=blocks)
    made._capturer.capture(1, torch.full((5, TOP_K), 7, dtype=torch.int32))
    yield made
    made.close()


def told(worker: Any) -> dict[str, np.ndarray]:
    """What leaves with a step of two requests, of two tokens and three."""
    worker.begin_step(AuxOutputConnectorMetadata(0, {"one": 0, "two": 0}, {}, ()))
    batch: Any = SimpleNamespace(
        req_ids=["one", "two"],
        num_computed_tokens_np=np.zeros(2, int),
        query_start_loc_np=np.array([0, 2, 5]),
    )
    pending = worker.prepare_output(batch)
    pending.enqueue_cpu_copy(np.ones(2, int), np.zeros(2, int))
    return {name: output.rows for name, output in pending.process_output().items()}


def test_no_request_says_for_itself_that_its_experts_are_told_and_those_of_all_leave_the_gpu(
    worker: vllms.AuxOutputWorkerConnector,
) -> None:
    """`_copy_asked` in worker/v2/asked_rows.py."""
    fields = {name for name in SamplingParams.__struct_fields__ if "routed" in name or "expert" in name}
    assert fields == {"routed_experts_prompt_start"}
    assert {name: len(rows) for name, rows in told(worker).items()} == {"one": 2, "two": 3}


def test_layers_that_do_not_route_have_rows_of_zeros(worker: vllms.AuxOutputWorkerConnector) -> None:
    """`_leave_out` in worker/v2/routed_experts.py."""
    assert told(worker)["one"].tolist() == [[[0, 0], [7, 7], [0, 0]]] * 2


def test_a_request_that_ends_and_begins_again_before_one_step_ends_the_engine(
    worker: vllms.AuxOutputWorkerConnector,
) -> None:
    """`_begin_anew` in worker/v2/routed_experts.py."""
    told(worker)
    with pytest.raises(AssertionError, match="cannot run and finish in one step"):
        worker.begin_step(AuxOutputConnectorMetadata(0, {"one": 0}, {}, ("one",)))


def test_requests_that_begin_alike_have_rows_under_one_name_and_those_of_the_first_stay() -> None:
    """engine/experts/own_rows.py. A block is named as its keys and values are, and whoever is told its rows
    is told those that came first; of one that is held no longer nobody is, and the engine ends."""
    connector, step = (
        AuxOutputSchedulerConnector(),
        SimpleNamespace(num_scheduled_tokens={"one": 4, "two": 4}),
    )
    request = SimpleNamespace(
        block_hashes=[b"alike"], sampling_params=SamplingParams(), num_prompt_tokens=4, num_output_tokens=0
    )
    given: Any = (step, {"one": request, "two": request})
    named = connector.build_connector_meta(*given).block_hashes
    assert named == dict.fromkeys(("one", "two"), PackedBlockHashes(b"alike", 5))
    store = BlockObjectStore(max_bytes=2, object_nbytes=1)
    for payload in (b"1", b"2"):
        store.put([BlockObject("alike", payload)])
    assert store.get_concatenated(["alike"]) == b"1"
    with pytest.raises(BlockObjectStoreError, match="may have been evicted"):
        store.get_concatenated(["another"])
    store.close()


def test_what_nobody_holds_any_more_is_kept_until_its_place_is_needed() -> None:
    """`_forget_released` in worker/v2/asked_rows.py."""
    store = BlockObjectStore(max_bytes=2, object_nbytes=1)
    store.put([BlockObject("ended", b"1")], retain_keys=["ended"])
    store.put([], release_keys=["ended"])
    assert store.get_concatenated(["ended"]) == b"1"
    store.close()
