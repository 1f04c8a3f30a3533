"""The yardsticks for training: the same model and adapter in plain PyTorch with PEFT, in this process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

_NO_TARGET = -100
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]


class BareLoop:
    """The training loop one would write without Tinsmith: PEFT, cross-entropy over the batch, AdamW."""

    def __init__(self, model_dir: Path, rank: int, learning_rate: float, threads: int) -> None:
        torch.set_num_threads(threads)
        base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        self._model = get_peft_model(base, LoraConfig(r=rank, lora_alpha=32, target_modules=TARGETS))
        trainable = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(
            trainable, lr=learning_rate, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0
        )

    def step(self, batch: Sequence[Sequence[int]]) -> None:
        """Forward, backward and optimizer step on sequences, which are filled up to the longest."""
        given = [torch.tensor(sequence) for sequence in batch]
        tokens = pad_sequence([each[:-1] for each in given], batch_first=True)
        targets = pad_sequence([each[1:] for each in given], batch_first=True, padding_value=_NO_TARGET)
        mask = None if (targets != _NO_TARGET).all() else (targets != _NO_TARGET).long()
        logits = self._model(input_ids=tokens, attention_mask=mask).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=_NO_TARGET
        )
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


def logprobs(model_dir: Path, adapter: Path | None, sequences: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Log-probability of every token after the first given those before it, float32 [N - 1] each.

    Args:
        adapter: PEFT directory, or None for the base model.
    """
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, str(adapter))
    model.eval()
    scores = []
    with torch.no_grad():
        for sequence in sequences:
            tokens = torch.tensor([list(sequence)])
            distribution = model(input_ids=tokens[:, :-1]).logits[0].log_softmax(-1)
            scores.append(distribution.gather(1, tokens[0, 1:, None]).squeeze(1))
    return scores
