"""What a stream tells of its sample, whatever samplers say again, otherwise or not at all."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from services.common.contract.errors import DataLoss, Internal
from services.gateway.access.answer_room import AnswerRoom
from services.gateway.edge.grpc import convert
from services.gateway.inference.streams import New, _Told
from services.gateway.sampling.replicas import _Heard
from tests.unit.gateway.edge.talking import floats, ints
from tinsmith.internal.v1 import sampler_pb2
from tinsmith.v1 import sampling_pb2


def delta(start: int, tokens: list[int], version: int = 0) -> sampler_pb2.SequenceDelta:
    return sampler_pb2.SequenceDelta(index=0, start=start, added=sequence(tokens), version=version)


def sequence(tokens: list[int], *spans: tuple[int, int]) -> sampling_pb2.SampledSequence:
    versions = [
        sampling_pb2.VersionSpan(version=version, tokens=count)
        for version, count in spans or [(0, len(tokens))]
    ]
    logprobs = floats([-token for token in tokens])
    return sampling_pb2.SampledSequence(tokens=ints(tokens), logprobs=logprobs, versions=versions)


def tokens_of(parts: Iterable[New]) -> list[int]:
    """What parts that come one after the other tell."""
    found: list[int] = []
    for part in parts:
        assert part.start == len(found)
        found += np.frombuffer(part.tokens, "<i4").tolist()
        assert np.frombuffer(part.logprobs, "<f4").tolist() == [-token for token in found[part.start :]]
    return found


def test_tokens_after_a_gap_wait_for_the_whole_sequence() -> None:
    with AnswerRoom(2**20).account("ann") as account:
        told = _Told(account)
        told.add([delta(2, [3])])
        assert list(told.take()) == []
        told.end([sequence([1, 2, 3])])
        assert tokens_of(told.take()) == [1, 2, 3]


def made_by(parts: Iterable[New]) -> list[tuple[int, list[int]]]:
    """The version of each part, and its tokens."""
    return [(part.version, np.frombuffer(part.tokens, "<i4").tolist()) for part in parts]


def test_every_part_is_of_the_one_version_that_made_its_tokens() -> None:
    with AnswerRoom(2**20).account("ann") as account:
        told = _Told(account)
        told.add([delta(0, [1, 2], version=3), delta(2, [3], version=5)])
        told.add([delta(4, [9], version=8)])
        assert made_by(told.take()) == [(3, [1, 2]), (5, [3])]
        told.end([sequence([1, 2, 3, 4, 5, 6], (3, 2), (5, 2), (8, 2))])
        assert made_by(told.take()) == [(5, [4]), (8, [5, 6])]


def test_what_is_told_again_on_newer_weights_goes_on_with_their_version() -> None:
    with AnswerRoom(2**20).account("ann") as account:
        told = _Told(account)
        told.add([delta(0, [1, 2], version=3)])
        told.add([delta(0, [1, 2, 3], version=4)])
        assert made_by(told.take()) == [(3, [1, 2]), (4, [3])]


def test_a_sequence_of_which_a_sampler_does_not_say_what_made_it_fails() -> None:
    with AnswerRoom(2**20).account("ann") as account:
        told = _Told(account)
        with pytest.raises(Internal, match="2 of 3 tokens"):
            told.end([sequence([1, 2, 3], (3, 2))])


def test_who_comes_later_is_told_which_version_made_what() -> None:
    with AnswerRoom(2**20).account("ann") as account:
        heard, told = _Heard(account), _Told(account)
        heard.add([delta(0, [1], version=3), delta(1, [2], version=3)])
        heard.add([delta(2, [3, 4], version=5)])
        told.add(list(heard.parts()))
        assert made_by(told.take()) == [(3, [1, 2]), (5, [3, 4])]


@pytest.mark.parametrize("room", [0, 2 * 2100])
def test_tokens_that_there_is_no_room_for_wait_for_the_whole_sequence(room: int) -> None:
    answers = AnswerRoom(room)
    with answers.account("ann") as account:
        told = _Told(account)
        # Nobody reads meanwhile.
        for start, token in enumerate([1, 2, 3]):
            told.add([delta(start, [token])])
        assert answers.held <= room // 2
        told.end([sequence([1, 2, 3])])
        assert tokens_of(told.take()) == [1, 2, 3]
        assert answers.held == 0


def test_what_was_told_and_read_takes_no_room() -> None:
    answers = AnswerRoom(2 * 2100)
    with answers.account("ann") as account:
        told, found = _Told(account), []
        for start in range(500):
            told.add([delta(start, [start])])
            found += list(told.take())
        assert tokens_of(found) == list(range(500))
        assert answers.held == 0


@pytest.mark.parametrize(
    "again",
    [
        [delta(0, [1, 2, 3, 4])],
        [delta(0, [1]), delta(1, [2, 3]), delta(3, [4])],
        [delta(0, [1])],
        [],
    ],
)
def test_a_sequence_that_is_told_again_goes_on_behind_what_the_client_has(
    again: list[sampler_pb2.SequenceDelta],
) -> None:
    with AnswerRoom(2**20).account("ann") as account:
        told = _Told(account)
        told.add([delta(0, [1, 2]), delta(2, [3])])
        found = list(told.take())
        for part in again:
            told.add([part])
            found += list(told.take())
        told.end([sequence([1, 2, 3, 4, 5])])
        assert tokens_of([*found, *told.take()]) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("again", [[delta(0, [1, 9, 3])], [delta(0, [1]), delta(1, [9]), delta(2, [3, 4])]])
def test_a_sequence_that_is_told_otherwise_fails(again: list[sampler_pb2.SequenceDelta]) -> None:
    with AnswerRoom(2**20).account("ann") as account:
        told = _Told(account)
        told.add([delta(0, [1, 2, 3])])
        assert tokens_of(told.take()) == [1, 2, 3]
        for part in again:
            told.add([part])
        with pytest.raises(DataLoss):
            list(told.take())


@pytest.mark.parametrize("whole", [[1, 9, 3], [1, 2], []])
def test_a_sequence_that_ends_otherwise_fails(whole: list[int]) -> None:
    with AnswerRoom(2**20).account("ann") as account:
        told = _Told(account)
        told.add([delta(0, [1, 2, 3])])
        assert tokens_of(told.take()) == [1, 2, 3]
        told.end([sequence(whole)])
        with pytest.raises(DataLoss):
            list(told.take())


def test_tokens_come_in_messages_of_a_mebibyte_at_most() -> None:
    count = 2**18 + 1
    values = np.arange(count)
    whole = sequence(values.tolist())
    with AnswerRoom(0).account("ann") as account:
        told = _Told(account)
        told.end([whole])
        parts = list(told.take())
        assert list(told.take()) == []
    assert all(convert.stream_part(part).ByteSize() <= 2**20 for part in parts)
    assert [part.start for part in parts] == [
        sum(len(one.tokens) // 4 for one in parts[:i]) for i in range(5)
    ]
    assert b"".join(part.tokens for part in parts) == whole.tokens.data
    assert b"".join(part.logprobs for part in parts) == whole.logprobs.data
