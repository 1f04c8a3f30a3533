"""A model whose vocabulary is no multiple of 64 tokens, to which vLLM pads its output head."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.common.process import rpc
from tests.component.sampler.process import (
    MODEL_ID,
    floats,
    ints,
    make_adapter,
    make_model,
    replica,
    request,
    sample,
    write_snapshot,
)
from tests.reference import Reference
from tinsmith.internal.v1 import sampler_pb2_grpc
from tinsmith.v1 import sampling_pb2

pytestmark = pytest.mark.heavy

ODD = 500
TOLERANCE = 1e-4


async def test_an_adapter_of_a_head_that_is_padded_answers_as_the_reference(tmp_path: Path) -> None:
    model_dir = make_model(tmp_path / "model", tied=False, vocab=ODD)
    never = sampling_pb2.StopCondition(never={})
    tokens = list(range(ODD - 20, ODD))
    with replica(tmp_path, model_dir, "--max-loras", "2", "--max-sequences", "16") as sampler:
        stored = write_snapshot(sampler.data_dir.snapshot(MODEL_ID, 1), make_adapter(1, 8, vocab=ODD), 8)
        async with rpc.channel(sampler.address) as channel:
            stub = sampler_pb2_grpc.SamplerServiceStub(channel)
            for version, adapter in ((1, stored), (0, None)):
                judge = Reference(model_dir, adapter)
                result = await sample(
                    stub, request(tokens, version, scores=True, max_tokens=12, stop=never, seed=1)
                )
                sequence = result.sequences[0]
                made = ints(sequence.tokens)
                assert len(made) == 12 and max(made) < ODD
                found = torch.cat([floats(result.prompt_logprobs)[1:], floats(sequence.logprobs)])
                expected = judge.sequence_logprobs(tokens + made)
                torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
