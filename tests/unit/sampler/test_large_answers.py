"""An answer with the experts of many tokens is made once, and not copied from message to message."""

from __future__ import annotations

import subprocess
import sys

import numpy as np

from services.sampler import convert
from services.sampler.engine.sampling import SampleOutput, Sequence
from services.sampler.worker.prompt_scores import PromptScores, TopkLogprobs

MIB = 2**20
_PROGRAM = f"""
import numpy as np
from services.sampler import convert
from services.sampler.engine.sampling import SampleOutput, Sequence

def resident(line):
    with open("/proc/self/status") as status:
        return next(int(each.split()[1]) for each in status if each.startswith(line))

experts = np.ones((64 * {MIB} // 8, 4, 2), np.uint8)
output = SampleOutput([Sequence("length", [7], [-1.0], experts=experts)], 0)
before = resident("VmRSS:")
answer = convert.answer(output)
assert answer.bytes_to_keep > 64 * {MIB}
print((resident("VmHWM:") - before) // 1024)
"""


def test_experts_are_copied_into_bytes_and_these_into_the_answer() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 2.5 * 64


def test_the_bytes_of_an_answer_are_those_that_keeping_it_takes() -> None:
    likely = TopkLogprobs(np.zeros((500, 3), np.int32), np.zeros((500, 3), np.float32))
    experts = np.ones((500, 3, 2), np.uint16)
    sequences = [Sequence("stop", [1] * 500, [0.0] * 500, likely, experts=told) for told in (experts, None)]
    output = SampleOutput(sequences, 3, PromptScores(np.zeros(100, np.float32)))
    answer = convert.answer(output)
    assert answer.bytes_to_keep is not None
    assert 0 <= answer.response.ByteSize() - answer.bytes_to_keep < 50
    assert convert.refusal(ValueError("no")).bytes_to_keep is None
