"""Memory of the operations that a gateway has sent to trainers and that are not answered, over all models.

Invariants: they take at most one number of bytes, however many models there are; beyond it only a trainer
that has nothing under way is sent one operation, so none ever waits for another one. No trainer's operations
take more than is left for the others'. Of one trainer, models take turns in the order in which they came to
wait.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from services.gateway.access.shares import Shares
from services.gateway.dispatch.plan import Allowance

COPIES = 4
"""Memory of an operation under way at its peak, in times of its payload: as it was read, parsed, as a part of
its call's message, and as the transport holds it. Measured by the kernel in a process of its own
(tests/unit/gateway/dispatch/test_send_memory.py): 3.0 to 3.4 times 32 MiB that are sent at once."""


class SendRoom:
    """Counts what is under way, and who waits for room."""

    def __init__(self, nbytes: int) -> None:
        self._shares = Shares(nbytes)
        self._waiting: dict[str, OrderedDict[str, Callable[[], None]]] = {}

    @property
    def free(self) -> int:
        """Bytes that nothing takes."""
        return self._shares.free

    def allowance(self, trainer_id: str, model_id: str) -> Allowance:
        """What a model may send: nothing while it is another's turn."""
        queue = self._waiting.get(trainer_id)
        if queue and next(iter(queue)) != model_id:
            return Allowance(0, False)
        held = self._shares.held_by(trainer_id)
        return Allowance(max(0, (self._shares.free - held) // 2) // COPIES, held == 0)

    def take(self, trainer_id: str, nbytes: int) -> None:
        """So much payload is sent, within what `allowance` said."""
        self._shares.add(trainer_id, COPIES * nbytes)

    def give(self, trainer_id: str, nbytes: int) -> None:
        """So much is answered, or will not be sent after all."""
        self._shares.add(trainer_id, -COPIES * nbytes)
        for queue in self._waiting.values():
            next(iter(queue.values()))()

    def await_turn(self, trainer_id: str, model_id: str, wake: Callable[[], None]) -> None:
        """Lists a model that has more to send than it may. `wake` is called when it may be its turn."""
        self._waiting.setdefault(trainer_id, OrderedDict())[model_id] = wake

    def leave(self, trainer_id: str, model_id: str) -> None:
        """A model waits no more. Without effect when it did not."""
        queue = self._waiting.get(trainer_id)
        if queue is None or model_id not in queue:
            return
        del queue[model_id]
        if queue:
            next(iter(queue.values()))()
        else:
            del self._waiting[trainer_id]
