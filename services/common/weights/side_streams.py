"""Streams of a device beside those that compute, for work of other threads.

Invariant: a stream has one user at a time, and is used again. PyTorch's allocator keeps what is freed for the
stream that it was allocated on, and PyTorch has 32 streams of a device, which it hands out in turn: whoever
took a new one for every piece of work would leave memory behind on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

_unused: dict[torch.device, list[torch.cuda.Stream]] = {}


@contextmanager
def side_stream(
    device: torch.device, make: Callable[[torch.device], torch.cuda.Stream] = torch.cuda.Stream
) -> Iterator[torch.cuda.Stream]:
    """A stream that nobody else has meanwhile. What was done on it is waited for before it is given back, by
    whoever has it."""
    unused = _unused.setdefault(device, [])
    try:
        stream = unused.pop()
    except IndexError:
        stream = make(device)
    try:
        yield stream
    finally:
        unused.append(stream)
