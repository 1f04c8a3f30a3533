"""The independent judge of numbers: transformers + PEFT in float32, one sequence at a time.

Shares no code with the trainer or the sampler: adapters are read from their PEFT directories by
the PEFT library, losses are written out, the optimizer is torch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, DynamicCache


def check_logprobs(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Both are log-probabilities that the same weights give, computed in float32 in two ways.

    What rounding alone may part them by: of 150,000 tokens of the tiny model with an adapter that tests of
    the sampler have, transformers' own float32 is up to 7e-5 off its float64.
    """
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=2e-5)


class Reference:
    """A base model, with an adapter when a PEFT directory is given."""

    def __init__(self, model_dir: Path, adapter_dir: Path | None = None) -> None:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        if adapter_dir is not None:
            model = PeftModel.from_pretrained(model, adapter_dir, is_trainable=True)
        self.model = model.eval()

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """The adapter's matrices by the names their file has."""
        return {
            name.replace(".default", ""): parameter
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad and "lora_" in name
        }

    def distribution(self, tokens: Sequence[int]) -> torch.Tensor:
        """Log-probabilities of every next token, float32 [N, vocab]."""
        return self.model(torch.tensor([list(tokens)])).logits[0].float().log_softmax(-1)

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Logits of every next token, float32 [N, vocab]."""
        with torch.no_grad():
            logits: torch.Tensor = self.model(torch.tensor([list(tokens)])).logits[0].float()
        return logits

    def logprobs(self, tokens: Sequence[int], targets: Sequence[int]) -> torch.Tensor:
        """Log-probability of each target at its position, float32 [N]."""
        return self.distribution(tokens).gather(1, torch.tensor(list(targets)).unsqueeze(1)).squeeze(1)

    def sequence_logprobs(self, tokens: Sequence[int]) -> torch.Tensor:
        """Log-probability of each token after the first given those before it, float32 [N - 1]."""
        return self.logprobs(tokens[:-1], tokens[1:]).detach()

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The most likely continuation, `count` tokens, end-of-sequence ignored."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.distribution(tokens)[-1].argmax()))
        return tokens[len(prompt) :]


class KeptReference:
    """Several sets of weights that make one sequence, each over the keys and values of those before it."""

    def __init__(self, versions: Sequence[Reference]) -> None:
        self._versions = versions

    def distribution(self, tokens: Sequence[int], starts: Sequence[int]) -> torch.Tensor:
        """Log-probabilities of every next token, float32 [N, vocab].

        Args:
            starts: place of the first token that each version computes; that of the first is 0.
        """
        cache, rows = DynamicCache(), []
        for judge, start, end in zip(self._versions, starts, [*starts[1:], len(tokens)], strict=True):
            part = torch.tensor([list(tokens[start:end])])
            with torch.no_grad():
                answer = judge.model(part, past_key_values=cache, use_cache=True)
            rows.append(answer.logits[0].float().log_softmax(-1))
        return torch.cat(rows)
