"""How the interpreter looks for garbage in a process that reads large requests.

Invariants: what one request makes of lists and objects does not have all the others walked through again and
again while nothing else runs, and nothing is walked through for a process that ends. As the interpreter
comes, the parse of 1 MB of empty lists takes four times as long as with this, and the loop stands still
meanwhile.
"""

from __future__ import annotations

import atexit
import gc

_THRESHOLDS = (3_000, 10, 100)
"""New objects before the young are looked at, and how many such looks before one at the older and the oldest.
(The interpreter's own: 700, 10, 10.) Were the first much higher, connections that were closed would keep
their buffers for too long: 250 MiB under a flood of them with 50,000."""


def settle(young: int = _THRESHOLDS[0]) -> None:
    """Call once, when everything is loaded: what there is then stays for ever and is not looked at again.

    Args:
        young: new objects before they are looked at. More are for a process that has thousands at a time of
            which nearly all go by themselves: it would look at them again and again for nothing.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(young, *_THRESHOLDS[1:])


def skip_at_exit() -> None:
    """Call once: a process that ends leaves its objects to the kernel. Else the interpreter first looks for
    garbage among all of them, which takes seconds where vLLM is loaded, and is of no use."""
    atexit.register(gc.freeze)
