"""What an answer under way is told by samplers."""

from __future__ import annotations

from typing import Any

from services.common.contract.errors import Unavailable
from services.gateway.access.answer_room import AnswerRoom
from services.gateway.inference.inference import _Answer
from services.gateway.inference.question import Question
from tests.unit.gateway.edge.talking import floats, ints
from tinsmith.internal.v1 import sampler_pb2
from tinsmith.v1 import sampling_pb2


def delta(start: int, token: int) -> sampler_pb2.SequenceDelta:
    added = sampling_pb2.SampledSequence(tokens=ints([token]), logprobs=floats([-1]))
    return sampler_pb2.SequenceDelta(index=0, start=start, added=added)


async def test_a_sequence_that_goes_on_otherwise_fails_its_answer_once() -> None:
    unused: Any = None
    with AnswerRoom(2**20).account("ann") as account:
        answer = _Answer(unused, "ann", Question([[1]], stream=True), account)
        for start, token in ((0, 1), (0, 2), (0, 2), (1, 3)):
            answer._tell(0, [delta(start, token)])
        parts = [answer._parts.get_nowait()[0] for _ in range(answer._parts.qsize())]
        assert [isinstance(part, Unavailable) for part in parts] == [False, True]
