"""Which base models have samplers that draw by different algorithms: vLLM's two model runners do.

Invariant: samples go to all of them alike, for each answers rightly; only that a seed gives the same tokens
everywhere holds no more, which is told, and told once.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import Gauge

from services.common.state.registry import ServiceRecord

log = logging.getLogger(__name__)

MIXED = Gauge("tinsmith_mixed_runner_models", "Base models whose samplers have different model runners")

Runners = Mapping[str, Sequence[str]]
"""Samplers of one base model, by the model runner that they have."""


def mixed(records: Iterable[ServiceRecord]) -> dict[str, Runners]:
    """Base models whose samplers have different model runners, with who has which. What takes nothing new
    does not count, nor who does not say."""
    found: defaultdict[str, defaultdict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        if record.kind == "sampler" and record.state == "ready" and record.model_runner:
            found[record.base_model][record.model_runner].append(record.id)
    return {
        name: {runner: sorted(ids) for runner, ids in sorted(runners.items())}
        for name, runners in sorted(found.items())
        if len(runners) > 1
    }


def sentence(base_model: str, runners: Runners) -> str:
    """What that means, and what to do."""
    told = "; ".join(f"{runner}: {', '.join(ids)}" for runner, ids in runners.items())
    return (
        f"samplers of {base_model} have different model runners ({told}), so the same seed gives other "
        "tokens on some of them: give all the same --model-runner"
    )


class MixedRunners:
    """Says it of each base model once, until its samplers are alike again."""

    def __init__(self) -> None:
        self._said: frozenset[str] = frozenset()

    def look(self, records: Iterable[ServiceRecord]) -> None:
        """Takes note of the live samplers."""
        found = mixed(records)
        for name in found.keys() - self._said:
            log.warning("%s", sentence(name, found[name]))
        self._said = frozenset(found)
        MIXED.set(len(found))
