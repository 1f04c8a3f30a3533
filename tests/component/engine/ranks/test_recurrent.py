"""Models with layers that read weights of layers in them, which ZeRO-3 shards: they come to what they come to
where nothing is sharded, several sequences at once to what each comes to, and one of all ranks to what it
comes to on one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from services.trainer.compute.data import RowResult
from tests.component.engine.data import VOCAB, flat
from tests.component.engine.process import play
from tests.component.engine.ranks.recurrent import ADAPTER, FULL, ROWS, STEPS, Report
from tests.component.engine.reference import values
from tests.unit.trainer.compute.architectures import HYBRID, config_of, random_model

pytestmark = pytest.mark.heavy

LONG = pytest.mark.long


def joined(rows: Sequence[RowResult]) -> np.ndarray:
    return np.concatenate([values(row.outputs["logprobs"]) for row in rows])


def logprobs(report: Report, name: str, step: int) -> np.ndarray:
    """Of all rows, before a step."""
    assert len(report.results[name]) == STEPS and len(report.results[name][step]) == len(ROWS)
    return joined(report.results[name][step])


@pytest.mark.parametrize(
    "name",
    ["qwen3_5_text", pytest.param("qwen3_next", marks=LONG), pytest.param("qwen3_5_moe_text", marks=LONG)],
)
def test_shared_weights_train_as_whole_ones_do(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    model = tmp_path_factory.mktemp("model")
    random_model(config_of(name, {**HYBRID[name], "vocab_size": VOCAB}), "eager").save_pretrained(model)
    (alone,) = play("ranks.recurrent", model, tmp_path_factory.mktemp("alone"), Report, 1, stage=0)
    found, *_ = play("ranks.recurrent", model, tmp_path_factory.mktemp("ranks"), Report, 2, stage=3)
    for report in (alone, found):
        assert report.forwards == 1, "a forward pass of each row by itself"
        np.testing.assert_allclose(joined(report.together), logprobs(alone, ADAPTER, 0), rtol=0, atol=2e-5)
    for kind in (ADAPTER, FULL):
        first, second = (logprobs(alone, kind, step) for step in range(STEPS))
        assert np.abs(second - first).max() > 1e-2
        np.testing.assert_allclose(logprobs(found, kind, 0), first, rtol=0, atol=2e-5)
        np.testing.assert_allclose(logprobs(found, kind, 1), second, rtol=0, atol=1e-4)
        (long,), (expected,) = found.long[kind], alone.long[kind]
        assert long.failure is None
        np.testing.assert_allclose(joined([long]), joined([expected]), rtol=0, atol=1e-4)
        assert found.norms[kind] == pytest.approx(alone.norms[kind], rel=1e-3)
    assert alone.trained is not None and found.trained is not None
    assert any(".linear_attn." in name for name in found.trained.adapter)
    np.testing.assert_allclose(flat(found.trained), flat(alone.trained), rtol=1e-4, atol=1e-5)
