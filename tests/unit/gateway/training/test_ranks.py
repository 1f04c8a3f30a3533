"""A batch is journaled with the ranks that it is to be cut for, and what one of them holds."""

from __future__ import annotations

import msgspec
import numpy as np

from tests.unit.gateway.edges import Edges, new_model
from tests.unit.gateway.saved import failure
from tinsmith.internal.v1 import operation_pb2, tinker_pb2

PROTO = {"content-type": "application/x-protobuf"}


async def sent(edges: Edges, model: str, seq_id: int, length: int) -> operation_pb2.Operation | None:
    """What the journal has to be run of a batch of one datum."""
    message = tinker_pb2.TinkerForwardBackwardRequest(model_id=model, seq_id=seq_id, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.ones(length, "<i4").tobytes()
    for name, dtype, kind in (
        ("target_tokens", "<i8", tinker_pb2.TINKER_DATA_TYPE_INT64),
        ("weights", "<f4", tinker_pb2.TINKER_DATA_TYPE_FLOAT32),
    ):
        tensor = datum.loss_fn_inputs[name]
        tensor.dense, tensor.dtype = np.ones(length, dtype).tobytes(), kind
        tensor.shape.append(length)
    async with edges.http() as client:
        response = await client.post("forward_backward", content=message.SerializeToString(), headers=PROTO)
    assert response.status_code == 200, response.text
    return await edges.operation(model, seq_id)


async def test_a_batch_keeps_the_numbers_of_the_trainer_that_it_was_accepted_for(edges: Edges) -> None:
    trainer = edges.announcers["trainer"]
    together = {"world_size": 2, "max_sequence_tokens": 7, "one_rank_tokens": 4, "micro_batch_tokens": 64}
    await trainer.update(msgspec.structs.replace(trainer.record, **together))
    async with edges.http() as client:
        model = await new_model(edges, client)
        operation = await sent(edges, model, 1, length=7)
        assert operation is not None
        assert (operation.ranks, operation.one_rank_tokens, operation.micro_batch_tokens) == (2, 4, 64)
        # What all ranks together do not hold is refused with both numbers.
        assert await sent(edges, model, 2, length=8) is None
        said = (await failure(client, model, 2))["error"]
    assert "8 tokens are more than the 7 of one sequence" in said


async def test_where_no_sequence_is_split_a_batch_says_so(edges: Edges) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
    operation = await sent(edges, model, 1, length=3)
    assert operation is not None
    assert (operation.ranks, operation.one_rank_tokens) == (1, 0)
