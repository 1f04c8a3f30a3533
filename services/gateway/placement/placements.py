"""What was sent to which replica: the work under way there, and the prompt beginnings it should have cached.

Invariants: own work is counted exactly, that of other gateways as they last told it, and forgotten when they
tell nothing for SILENT_S. Of beginnings at most MOST_BLOCKS names are kept (about 50 MiB), of a replica no
more than its memory for keys and values has room for, those that were not used for longest going first. A
replica that is not there any more is forgotten with all of it. Knowing too much or too little costs speed,
never an answer.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import msgspec

from services.gateway.placement.prompt_blocks import BLOCK_TOKENS

MOST_BLOCKS = 1 << 18
MOST_TOLD = 8192
"""Names of blocks that one message has; what is beyond others do not learn."""
MOST_ADAPTERS = 64
"""Of one replica that one message names: an engine has slots for a few, and more only wait for those."""
SILENT_S = 5.0


class Load(msgspec.Struct, frozen=True):
    """What is under way at a replica, or what one sample adds to it.

    Attributes:
        tokens: of work, as `choose_replica` counts it.
        sequences: that are generated.
    """

    tokens: int = 0
    sequences: int = 0

    def __add__(self, other: Load) -> Load:
        return Load(self.tokens + other.tokens, self.sequences + other.sequences)

    def __sub__(self, other: Load) -> Load:
        return Load(self.tokens - other.tokens, self.sequences - other.sequences)


NOTHING = Load()


@dataclass(frozen=True)
class News:
    """What one gateway tells the others.

    Attributes:
        load: its work under way at each replica, all of it.
        adapters: that this work needs at each replica, MOST_ADAPTERS of one at most.
        blocks: names of blocks that it sent to each replica since it last told.
    """

    gateway: str
    load: Mapping[str, Load]
    adapters: Mapping[str, Sequence[str]]
    blocks: Mapping[str, Sequence[int]]


@dataclass
class _Sent:
    """To one replica, by all gateways: blocks in the order of their last use."""

    blocks: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def known(self, chain: Sequence[int]) -> int:
        """How many blocks of a chain it has, from the first on."""
        return next((n for n, name in enumerate(chain) if name not in self.blocks), len(chain))

    def note(self, chain: Sequence[int]) -> None:
        # The end is of no use without the beginning, which therefore goes last.
        for name in reversed(chain):
            self.blocks[name] = None
            self.blocks.move_to_end(name)

    def trim(self, most: int) -> None:
        while len(self.blocks) > most:
            self.blocks.popitem(last=False)


class Placements:
    """Of one gateway.

    Args:
        gateway: its id.
        clock: seconds, monotonic.
    """

    def __init__(self, gateway: str, clock: Callable[[], float]) -> None:
        self._gateway = gateway
        self._clock = clock
        self._own: dict[str, Load] = {}
        self._adapters: dict[str, Counter[str]] = {}
        self._others: dict[str, tuple[float, News]] = {}
        self._sent: dict[str, _Sent] = {}
        self._room: dict[str, int] = {}
        self._untold: dict[str, dict[int, None]] = {}
        self._told_load: dict[str, Load] = {}

    def keep(self, kv_tokens: Mapping[str, int]) -> None:
        """Forgets all replicas but these.

        Args:
            kv_tokens: what each has room for; 0 = not known.
        """
        share = MOST_BLOCKS // max(1, len(kv_tokens))
        self._room = {
            name: min(share, tokens // BLOCK_TOKENS + 1) if tokens else share
            for name, tokens in kv_tokens.items()
        }
        for gone in self._sent.keys() - kv_tokens.keys():
            del self._sent[gone]
        for gone in self._untold.keys() - kv_tokens.keys():
            del self._untold[gone]
        for name, sent in self._sent.items():
            sent.trim(self._room[name])

    def load(self, replica: str) -> Load:
        """What is under way at a replica."""
        heard = (news.load.get(replica, NOTHING) for news in self._heard())
        return sum(heard, self._own.get(replica, NOTHING))

    def adapters(self, replica: str) -> set[str]:
        """Adapters that the work under way at a replica needs."""
        return set(self._adapters.get(replica, ())).union(
            *(news.adapters.get(replica, ()) for news in self._heard())
        )

    def known(self, replica: str, chain: Sequence[int]) -> int:
        """How many blocks of a chain, from the first on, a replica should have."""
        sent = self._sent.get(replica)
        return sent.known(chain) if sent else 0

    def begin(self, replica: str, chain: Sequence[int], work: Load, adapter: str = "") -> None:
        """A sample with these blocks, that comes to so much work there, is sent to a replica.

        Args:
            adapter: that it needs; "" = none.
        """
        self._own[replica] = self._own.get(replica, NOTHING) + work
        if adapter:
            self._adapters.setdefault(replica, Counter())[adapter] += 1
        self._note(replica, chain)
        if replica in self._room:
            # The whole chain, so that its beginning counts as used elsewhere too.
            self._untold.setdefault(replica, {}).update(dict.fromkeys(chain[: self._left_to_tell()]))

    def end(self, replica: str, work: Load, adapter: str = "") -> None:
        """That sample is under way no more."""
        left = self._own.pop(replica, NOTHING) - work
        if left != NOTHING:
            self._own[replica] = left
        if adapter:
            # What comes to nothing leaves.
            needed = self._adapters.pop(replica, Counter()) - Counter([adapter])
            if needed:
                self._adapters[replica] = needed

    def news(self) -> News | None:
        """What is to be told now; None = nothing. Nothing of it is told again but the load."""
        load = dict(self._own)
        if not load and not self._untold and not self._told_load:
            return None
        blocks = {name: list(untold) for name, untold in self._untold.items()}
        self._untold.clear()
        self._told_load = load
        adapters = {name: list(islice(needed, MOST_ADAPTERS)) for name, needed in self._adapters.items()}
        return News(self._gateway, load, adapters, blocks)

    def hear(self, news: News) -> None:
        """Takes in what a gateway told."""
        if news.gateway == self._gateway:
            return
        now = self._clock()
        self._others = {name: told for name, told in self._others.items() if now - told[0] < SILENT_S}
        self._others[news.gateway] = (now, replace(news, blocks={}))
        for replica, chain in news.blocks.items():
            self._note(replica, chain)

    def _heard(self) -> Iterator[News]:
        now = self._clock()
        return (news for at, news in self._others.values() if now - at < SILENT_S)

    def _left_to_tell(self) -> int:
        return MOST_TOLD - sum(len(untold) for untold in self._untold.values())

    def _note(self, replica: str, chain: Sequence[int]) -> None:
        # One that is not announced here yet, or no more, would be kept by nobody.
        room = self._room.get(replica)
        if room is not None:
            sent = self._sent.setdefault(replica, _Sent())
            sent.note(chain)
            sent.trim(room)
