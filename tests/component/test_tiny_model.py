"""The tiny model is a complete Hugging Face model with a tokenizer that can encode anything."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.launcher.tiny_model import make_tiny_model

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def test_it_loads_as_a_float32_qwen3_of_the_asked_sizes(directory: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert model.dtype == torch.float32
    config = model.config
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (512, 128, 4)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 32)
    assert (config.intermediate_size, config.max_position_embeddings) == (384, 2048)


@pytest.mark.parametrize("text", ["hello world", "naïve ☃ 雪 🙂\n\ttabs", "".join(map(chr, range(1, 256)))])
def test_the_tokenizer_encodes_any_text_within_the_vocabulary(directory: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = tokenizer.encode(text)
    assert max(ids) < 512
    assert tokenizer.decode(ids) == text


def test_every_id_of_the_model_is_a_token(directory: Path) -> None:
    assert len(AutoTokenizer.from_pretrained(directory)) == 512


def test_special_tokens_and_chat_template_are_those_of_qwen3(directory: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert tokenizer.is_fast
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>"):
        assert len(tokenizer.encode(token)) == 1
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_the_same_seed_gives_the_same_files(directory: Path, tmp_path: Path) -> None:
    again = make_tiny_model(tmp_path / "again")
    other = make_tiny_model(tmp_path / "other", seed=1)
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (again / name).read_bytes() == (directory / name).read_bytes()
    assert (other / "model.safetensors").read_bytes() != (directory / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    "sizes", [{"vocab": 258}, {"hidden": 130}, {"heads": 3}, {"kv_heads": 3}, {"layers": 0}]
)
def test_sizes_that_do_not_fit_together_are_refused(tmp_path: Path, sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be"):
        make_tiny_model(tmp_path, **sizes)  # type: ignore[arg-type]
