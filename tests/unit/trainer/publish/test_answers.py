"""For which members a group did not come together, or a broadcast did not arrive."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest

from services.common.process import rpc
from services.common.state.registry import ServiceRecord
from services.trainer.publish.answers import at_fault, waited_in_vain
from services.trainer.publish.members import Member, first_ranks, of_ranks

SILENT = ConnectionError("gone")
TOLD = grpc.aio.AioRpcError(
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.aio.Metadata(),
    grpc.aio.Metadata((rpc.CODE_METADATA, "deadline_exceeded")),
)
NOT_IN_GROUP = grpc.aio.AioRpcError(
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.aio.Metadata(),
    grpc.aio.Metadata((rpc.CODE_METADATA, "not_in_group")),
)


@pytest.mark.parametrize(
    ("answers", "absent", "found"),
    [
        ([None, SILENT, TOLD], [False, False, False], [False, True, False]),
        ([None, TOLD, TOLD], [False, False, False], [False, True, True]),
        ([TOLD, None, TOLD], [False, True, False], [False, True, False]),
        ([TOLD, None, SILENT], [False, True, False], [False, True, True]),
        ([TOLD, TOLD], [True, False], [True, False]),
        ([None, None], [False, False], [False, False]),
    ],
    ids=["dead", "each tells", "hangs", "hangs and dead", "its workers hang", "nobody"],
)
def test_who_only_waited_for_another_is_not_at_fault(
    answers: list[object], absent: list[bool], found: list[bool]
) -> None:
    assert at_fault(answers, absent) == found


def test_a_member_is_found_by_any_of_its_workers() -> None:
    members = [
        Member(ServiceRecord(kind="sampler", id=f"s{size}", address="", base_model="", world_size=size))
        for size in (1, 4, 2)
    ]
    assert first_ranks(members) == [1, 2, 6, 8]
    assert of_ranks(members, ()) == [False, False, False]
    assert of_ranks(members, (0, 5)) == [False, True, False]
    assert of_ranks(members, (1, 6, 7)) == [True, False, True]


@pytest.mark.parametrize(
    ("own", "answers", "found"),
    [
        (TimeoutError(), [None, None], True),
        (None, [None, TOLD], True),
        (RuntimeError(), [None, SILENT], False),
        (None, [None, None], False),
        (None, [None, NOT_IN_GROUP], False),
    ],
    ids=["the sender", "a receiver", "one is gone", "not yet", "another reason"],
)
def test_who_waits_until_its_deadline_and_knows_of_nobody_that_is_gone_waits_for_one_that_hangs(
    own: BaseException | None, answers: list[object], found: bool
) -> None:
    assert waited_in_vain(own, answers) is found
