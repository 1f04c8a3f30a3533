"""A model whose vocabulary is no multiple of 64 tokens, to which vLLM pads its output head."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.component.sampler.process import (
    NEVER,
    floats,
    ints,
    make_model,
    replica,
    request,
    sample,
)
from tests.reference import Reference, check_logprobs

pytestmark = pytest.mark.heavy

ODD = 500


async def test_an_adapter_of_a_head_that_is_padded_answers_as_the_reference(tmp_path: Path) -> None:
    model_dir = make_model(tmp_path / "model", tied=False, vocab=ODD)
    tokens = list(range(ODD - 20, ODD))
    with replica(tmp_path, model_dir, "--max-loras", "2", "--max-sequences", "16") as sampler:
        stored = sampler.store_adapter(1, 8, vocab=ODD)
        async with sampler.client() as stub:
            for version, adapter in ((1, stored), (0, None)):
                judge = Reference(model_dir, adapter)
                result = await sample(
                    stub, request(tokens, version, scores=True, max_tokens=12, stop=NEVER, seed=1)
                )
                sequence = result.sequences[0]
                made = ints(sequence.tokens)
                assert len(made) == 12 and max(made) < ODD
                found = torch.cat([floats(result.prompt_logprobs)[1:], floats(sequence.logprobs)])
                expected = judge.sequence_logprobs(tokens + made)
                check_logprobs(found, expected)
