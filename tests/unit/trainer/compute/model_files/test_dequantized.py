"""Which quantised weights are read as what they stand for, whatever the device could compute with."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from services.common.contract.errors import InvalidRequest
from services.trainer.compute.model_files.dequantized import read_whole, whole_blocks


@pytest.mark.parametrize("kind", ["fp8", "mxfp4"])
@pytest.mark.parametrize("within", [False, True], ids=["of both", "of the text model"])
def test_those_that_the_library_reads_whole_are_read_whole(kind: str, within: bool) -> None:
    both = AutoConfig.for_model("gemma3")
    text = both.get_text_config()
    (text if within else both).quantization_config = {"quant_method": kind, "weight_block_size": [16, 16]}
    read_whole(text, both, "org/model", sharded=False)
    assert text.quantization_config == {
        "quant_method": kind,
        "weight_block_size": [16, 16],
        "dequantize": True,
    }


def test_others_are_refused_with_what_to_use() -> None:
    config = AutoConfig.for_model("qwen3")
    config.quantization_config = {"quant_method": "awq"}
    with pytest.raises(InvalidRequest, match=r"org/model: its files are quantised \(awq\).*was quantised"):
        read_whole(config, config, "org/model", sharded=False)


def test_a_model_that_is_not_quantised_stays_as_it_is() -> None:
    config = AutoConfig.for_model("qwen3")
    read_whole(config, config, "org/model", sharded=False)
    assert not hasattr(config, "quantization_config")


def test_blocks_are_as_large_as_files_say_where_the_library_takes_them_to_be_equal_parts() -> None:
    says = SimpleNamespace(weight_block_size=(24, 24))
    reads = Fp8Dequantize(SimpleNamespace(quantization_config=says))
    given = torch.ones(32, 30).to(torch.float8_e4m3fn), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    theirs = reads._dequantize_one(*given)
    with whole_blocks():
        ours = reads._dequantize_one(*given)
    assert [ours[0, 0], ours[23, 24], ours[24, 23], ours[31, 29]] == [1, 2, 3, 4]
    # Else nothing is to be corrected any more.
    assert theirs[20, 0] == 3 and ours[20, 0] == 1
    assert torch.equal(reads._dequantize_one(*given), theirs)
