"""Makes a tiny random Qwen3 language model with its tokenizer, for tests and for trying Tinsmith offline.

Invariant: the same arguments give the same files, and the tokenizer can encode any text (all 256
bytes are in its vocabulary), never yields an id outside the model's vocabulary, and has the special
tokens, ChatML turns and form of tool calls of the real Qwen3 (`<|im_end|>` ends a turn, `<|endoftext|>`
pads).
"""

from __future__ import annotations

import json
from pathlib import Path

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SMALLEST_VOCAB = 256 + len(SPECIAL_TOKENS)

CHATML_TEMPLATE = (
    "{%- if tools %}"
    "{{- '<|im_start|>system\\nYou may call these functions:\\n<tools>\\n' }}"
    "{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}"
    "{{- '</tools>\\nA call is JSON between tags:\\n<tool_call>\\n"
    '{"name": <name>, "arguments": <arguments>}'
    "\\n</tool_call><|im_end|>\\n' }}"
    "{%- endif %}"
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') }}"
    "{%- for call in message['tool_calls'] or [] %}"
    "{{- '<tool_call>\\n' + call['function'] | tojson + '\\n</tool_call>' }}"
    "{%- endfor %}"
    "{{- '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

# Merges are learned from this text; it only has to look like what the demos feed the model.
_TRAINING_TEXT = (
    "The quick brown fox jumps over the lazy dog. What is the sum of two numbers?",
    "Question: what is 12 + 34? Answer: 46. Question: what is 7 * 8? Answer: 56.",
    "A blacksmith works with iron; a tinsmith works with tin, and makes small things well.",
    "You are a helpful assistant. Please answer the question, and think step by step.",
    "def add(first, second):\n    return first + second\n\nprint(add(1, 2))",
    "There was once a small model that learned to speak, one token after another.",
    "In the beginning there were only bytes; then came the merges, and the words were made.",
    "User: hello, who are you?\n\nAssistant: I am a very small language model.",
    "Paris is the capital of France, Rome is the capital of Italy, and Madrid is the capital of Spain.",
    "She sold seashells by the seashore while the wind was blowing from the north over the water.",
    "Every morning the children went to school; every evening they came home and told their stories.",
    "Because the number is even, it can be divided by two without a remainder, therefore it is not prime.",
    "for index in range(10):\n    if index % 2 == 0:\n        total += index\n    else:\n        continue",
)


def make_tiny_model(
    directory: str | Path,
    *,
    vocab: int = 512,
    hidden: int = 128,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    intermediate: int = 384,
    context: int = 2048,
    seed: int = 0,
    tie_embeddings: bool = True,
) -> Path:
    """Writes a randomly initialised Qwen3 and its tokenizer to `directory` and returns that path.

    The weights are float32 safetensors. `hidden` must be divisible by `heads` with an even quotient
    (rotary embedding) and `heads` by `kv_heads`; `vocab` is at least 259 (256 bytes and 3 special
    tokens).

    Raises ValueError when the sizes do not fit together.
    """
    if vocab < SMALLEST_VOCAB:
        raise ValueError(f"vocab must be at least {SMALLEST_VOCAB} (256 bytes + special tokens), got {vocab}")
    if min(hidden, layers, heads, kv_heads, intermediate, context) < 1:
        raise ValueError("hidden, layers, heads, kv_heads, intermediate and context must be at least 1")
    if hidden % heads or (hidden // heads) % 2:
        raise ValueError(f"hidden ({hidden}) must be an even multiple of heads ({heads})")
    if heads % kv_heads:
        raise ValueError(f"heads ({heads}) must be a multiple of kv_heads ({kv_heads})")

    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    token_ids = write_tokenizer(target, vocab, context)
    _write_model(
        target,
        seed,
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        intermediate_size=intermediate,
        max_position_embeddings=context,
        tie_word_embeddings=tie_embeddings,
        bos_token_id=None,
        eos_token_id=token_ids["<|im_end|>"],
        pad_token_id=token_ids["<|endoftext|>"],
    )
    return target


def write_tokenizer(target: Path, vocab: int, context: int) -> dict[str, int]:
    """Writes the tokenizer of `make_tiny_model` alone; the ids of its special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - len(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TRAINING_TEXT, trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(target / "tokenizer.json"))

    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHATML_TEMPLATE,
    }
    (target / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return {token: tokenizer.token_to_id(token) or 0 for token in SPECIAL_TOKENS}


def _write_model(target: Path, seed: int, **config: object) -> None:
    # Imported here so that the command line can print its help without loading torch.
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(Qwen3Config(dtype="float32", **config)).to(torch.float32)
    model.generation_config = GenerationConfig(
        eos_token_id=[config["eos_token_id"], config["pad_token_id"]], pad_token_id=config["pad_token_id"]
    )
    model.save_pretrained(target, safe_serialization=True)
