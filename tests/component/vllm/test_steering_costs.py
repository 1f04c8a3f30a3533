"""What steers one request costs those that share its steps little."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm import SamplingParams
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.request import Request
from vllm.v1.sample.ops.bad_words import apply_bad_words

from services.sampler.engine.scheduler import look_up_stop_tokens
from services.sampler.worker.v1.sampling import leave_out

VOCAB = 32


class Calls(TorchDispatchMode):
    """Counts what PyTorch is asked for."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("seed", range(20))
def test_bad_words_leave_out_what_vllms_own_way_does(seed: int) -> None:
    chance = random.Random(seed)

    def some(most: int, ids: int = 3) -> list[int]:
        return [chance.randrange(ids) for _ in range(chance.randint(1, most))]

    before = [some(6)[1:] for _ in range(8)]
    words = {row: [some(4) for _ in range(chance.randint(1, 5))] for row in range(0, 8, 2)}
    words[6] += [[VOCAB - 1], [VOCAB]]
    expected, found = torch.zeros(8, VOCAB), torch.zeros(8, VOCAB)
    apply_bad_words(expected, words, before)
    leave_out(found, words, before)
    assert torch.equal(found, expected)
    assert expected.isinf().any()


def test_many_bad_words_are_written_at_once() -> None:
    words = {row: [[token] for token in range(VOCAB)] for row in range(8)}
    with Calls() as calls:
        leave_out(torch.zeros(8, VOCAB), words, [[1]] * 8)
    assert calls.count < 10
    with Calls() as none:
        leave_out(torch.zeros(8, VOCAB), {0: [[1, 2]]}, [[]])
    assert none.count == 1


def asked(stop_tokens: int) -> Request:
    """One that has come to its last stop token but one."""
    ids = list(range(1000, 1000 + stop_tokens))
    request = Request("r", [1, 2], SamplingParams(max_tokens=9, stop_token_ids=ids), None)
    look_up_stop_tokens(scheduler := SimpleNamespace(add_request=lambda _: None))
    scheduler.add_request(request)
    return request


def test_stop_tokens_end_a_sequence_and_others_do_not() -> None:
    request = asked(4096)
    request.append_output_token_ids([999])
    assert not check_stop(request, 100)
    request.append_output_token_ids([5095])
    assert check_stop(request, 100)
    assert request.stop_reason == 5095


def test_many_stop_tokens_are_not_read_through_in_each_step() -> None:
    request, compared = asked(4096), 0

    class Compared(int):
        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return int(self) == other

        __hash__ = int.__hash__

    request.append_output_token_ids([Compared(5)])
    assert not check_stop(request, 100)
    assert compared < 10
