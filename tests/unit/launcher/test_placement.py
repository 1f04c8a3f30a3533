"""Which cores and GPUs each computing process gets."""

from __future__ import annotations

from typing import Any

import pytest

from services.launcher.placement import Counts, counts, left_to_trainers, places


def test_processes_with_enough_cores_are_bound_to_cores_of_their_own() -> None:
    trainer, sampler = places([2, 1], tuple(range(6)), ())
    assert (trainer.threads, trainer.cores) == (2, (0, 1, 2, 3))
    assert (sampler.threads, sampler.cores) == (2, (4, 5))


def test_with_one_core_each_the_kernel_chooses_and_nothing_spins() -> None:
    assert [(place.threads, place.cores) for place in places([1, 1], (0, 1), ())] == [(1, ()), (1, ())]


def test_with_fewer_cores_than_processes_each_still_has_a_thread() -> None:
    assert {place.threads for place in places([2, 1, 1], (0, 1), ())} == {1}


def test_each_process_gets_a_gpu_of_its_own_while_there_are_some() -> None:
    trainer, sampler = places([2, 1], range(16), ("0", "1", "2"))
    assert trainer.gpus == ("0", "1")
    assert sampler.gpus == ("2",)
    assert sampler.gpu_memory == 0.9
    assert trainer.cores == ()


def test_one_gpu_is_shared_and_the_sampler_leaves_room() -> None:
    trainer, sampler = places([1, 1], (0, 1), ("GPU-a",))
    assert trainer.gpus == sampler.gpus == ("GPU-a",)
    assert sampler.gpu_memory == 0.4
    crowded = places([1, 1, 1, 1], (0, 1), ("0",))
    assert sum(place.gpu_memory for place in crowded[1:]) < 0.7


def test_trainers_have_what_samplers_leave_of_a_gpu_and_share_it() -> None:
    def left(*ranks: int, trainers: int, gpus: str, memory: float) -> list[float | None]:
        placed = places(ranks, (0, 1), tuple(gpus))
        return left_to_trainers(placed[:trainers], [(place, memory) for place in placed[trainers:]])

    assert left(1, 1, trainers=1, gpus="0", memory=0.4) == [0.55]
    assert left(1, 1, 1, 1, trainers=2, gpus="0", memory=0.2) == [0.275, 0.275]
    assert left(1, 1, trainers=1, gpus="01", memory=0.9) == [None]
    # Its first rank is where the sampler is; what a rank may take is the same on all.
    assert left(2, 1, trainers=1, gpus="01", memory=0.4) == [0.55]
    # Two trainers on one GPU, and nobody else.
    assert left(1, 1, trainers=2, gpus="0", memory=0.0) == [0.475, 0.475]
    assert left(1, 1, trainers=1, gpus="0", memory=0.95) == [0.0]


def test_the_ranks_of_a_process_never_share_a_gpu() -> None:
    for place in places([3, 3, 1], range(4), ("0", "1", "2", "3")):
        assert len(set(place.gpus)) == len(place.gpus)


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        ({"gpus": 0}, Counts(1, 1)),
        ({"gpus": 1}, Counts(1, 1)),
        ({"gpus": 2}, Counts(1, 1)),
        ({"gpus": 3}, Counts(2, 1)),
        ({"gpus": 8}, Counts(4, 4)),
        ({"gpus": 8, "models": 2}, Counts(2, 2)),
        ({"gpus": 8, "models": 9}, Counts(1, 1)),
        ({"gpus": 8, "sampler_gpus": 2}, Counts(4, 2)),
        ({"gpus": 8, "sampler_gpus": 8}, Counts(1, 1)),
        ({"gpus": 8, "ranks": 2}, Counts(2, 6)),
        ({"gpus": 8, "ranks": 8}, Counts(8, 1)),
        ({"gpus": 8, "samplers": 2}, Counts(6, 2)),
        ({"gpus": 8, "samplers": 0}, Counts(8, 0)),
        ({"gpus": 8, "ranks": 3, "samplers": 1}, Counts(3, 1)),
    ],
    ids=str,
)
def test_a_machine_is_divided_between_training_and_sampling(
    machine: dict[str, int], expected: Counts
) -> None:
    asked: dict[str, Any] = {"models": 1, "sampler_gpus": 1, "ranks": None, "samplers": None, **machine}
    assert counts(**asked) == expected


def test_what_is_decided_leaves_no_gpu_of_eight_shared_or_idle() -> None:
    decided = counts(models=1, gpus=8, sampler_gpus=1, ranks=None, samplers=None)
    placed = places([decided.ranks, *[1] * decided.samplers], range(64), tuple("01234567"))
    assert sorted(gpu for place in placed for gpu in place.gpus) == list("01234567")
    assert not any(place.shared for place in placed)
