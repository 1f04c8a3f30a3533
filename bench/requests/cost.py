"""What a sample costs the processes that pass it on, in time of a core: the gateway, a sampler's front end.

The time is what these processes used, not what passed, so that the engine and the client, which share the
cores, do not count. The client sends as fast as it is answered: a process that mostly waits takes more time
for each, as it does less at once.
"""

from __future__ import annotations

import contextlib
import statistics
import time

import psutil

from bench.child import Child
from bench.requests.sampler_load import PROMPT_TOKENS
from bench.rows import Row
from bench.stack import Stack, on_a_tiny_model

_WARM_UP, _SAMPLES, _ROUNDS = 500, 2000, 5
_REST_S = 5.0
"""Between rounds: a key may send a gateway 1,000 requests a second over a while (--requests-per-second), and
a round may send 4,000 in less than four."""
_SIDES = {
    "gateway": ("services.gateway", 1000.0),
    "front end of a sampler": ("services.sampler", 2000.0),
}
"""The module that a process runs, and the samples a second that a core should pass on."""


def one_token_samples(stack: Stack) -> list[Row]:
    """One-token samples that a core passes on in a second; a client elsewhere asks for 2,000 at once. On a
    tiny model, so that nobody waits for the engine's passes."""
    spent: dict[str, list[float]] = {side: [] for side in _SIDES}
    elapsed = []
    with on_a_tiny_model(stack) as tiny:
        processes = {side: running(tiny, module) for side, (module, _) in _SIDES.items()}
        arguments = [tiny.base_url, tiny.api_key, str(tiny.vocab)]
        log = tiny.scratch / "sampler-load.log"
        with contextlib.closing(Child("bench.requests.sampler_load", arguments, {}, log)) as client:
            client.ask({"samples": _WARM_UP})
            for _ in range(_ROUNDS):
                time.sleep(_REST_S)
                before = {side: used(process) for side, process in processes.items()}
                elapsed.append(client.ask({"samples": _SAMPLES}))
                for side, process in processes.items():
                    spent[side].append(used(process) - before[side])
    return [cost_row(side, spent[side], elapsed, at_least) for side, (_, at_least) in _SIDES.items()]


def cost_row(side: str, spent: list[float], elapsed: list[float], at_least: float) -> Row:
    """Samples per second of a core: the median of the rounds.

    Args:
        spent: seconds that the process had a core, of each round.
        elapsed: seconds from the first request of a round to its last result.
    """
    return Row(
        f"{side}: one-token samples by one core",
        _SAMPLES / statistics.median(spent),
        "samples/s",
        at_least=at_least,
        details={
            "core_ms_per_sample": round(1e3 * statistics.median(spent) / _SAMPLES, 3),
            "lowest": round(_SAMPLES / max(spent), 1),
            "highest": round(_SAMPLES / min(spent), 1),
            "rounds": len(spent),
            "samples": _SAMPLES,
            "samples_per_s_on_this_machine": round(_SAMPLES / statistics.median(elapsed), 1),
            "prompt_tokens": PROMPT_TOKENS,
        },
    )


def running(stack: Stack, module: str) -> psutil.Process:
    """The process of the measured cluster that runs a module; there is one of each.

    Raises:
        RuntimeError: there is none, or more.
    """
    found = [process for process in stack.processes() if module in process.cmdline()]
    if len(found) != 1:
        raise RuntimeError(f"{len(found)} processes of the cluster run {module}")
    return found[0]


def used(process: psutil.Process) -> float:
    """Seconds that its threads had a core so far; its children do not count."""
    times = process.cpu_times()
    return float(times.user + times.system)
