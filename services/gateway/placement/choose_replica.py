"""Which sampler replica a sample goes to: a pure decision.

Invariants: everything is counted in tokens: of work that is under way at a replica, and of work that it is
spared because it has the prompt's beginning cached. A sample goes where the difference is least, so a
conversation returns to its cache until another replica has that much less to do. Only a replica that
generates many more sequences than another counts without its cache: a prompt that all share must not keep all
work on one replica, which would refuse it. Samples prefer replicas whose engine has their weights: swapping
them in elsewhere takes long, and stops what runs there. An adapter goes where it finds a slot. Replicas that
are as good as each other share samples, but for those that begin alike: these go to the same one, also by
gateways that have not heard of each other's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence, Set

import msgspec

from services.common.state.registry import ServiceRecord
from services.gateway.placement import prompt_blocks
from services.gateway.placement.placements import Load, Placements

SEQUENCE_TOKENS = 256
"""Most that a sequence under generation counts, whatever it may still come to: how many tokens a sequence has
is not known before its end, and `max_tokens` is often the whole context."""
KNOWN_TOKENS = 1024
"""What a replica is spared that was sent this adapter before, which it need not load, or this beginning of a
prompt: samples with a short one in common stay together when they come at once."""
CACHED_WORTH = 3
"""What a cached token counts. A sample that leaves its cache computes its beginning anew, has it held twice,
and its conversation's next turns find a part of it here and a part there."""
SWAP_TOKENS = 64 * SEQUENCE_TOKENS
"""What a replica is spared that need not swap its engine's weights, or that has a slot for the adapter: for
either, what runs there has to end first."""
FEW_SEQUENCES = 8
"""How many more sequences than another a replica may have under way whatever its size, and keep what it has
cached: half of those that every sampler takes on beside what it generates."""


class Replica(msgspec.Struct, frozen=True):
    """A live sampler.

    Attributes:
        load: what is under way there, of all gateways.
        known: how many of the sample's blocks it knows.
        weights: full snapshot in its engine; "" = the base model, which adapters need too.
        max_sequences: that it generates at once; 0 = not known.
        waits: the sample would wait there for an adapter's slot; see `waits`.
    """

    id: str
    load: Load
    known: int = 0
    weights: str = ""
    max_sequences: int = 0
    waits: bool = False


class Wanted(msgspec.Struct, frozen=True):
    """What decides where a sample had best go.

    Attributes:
        weights: as Replica.weights: what it needs in the engine.
        adapter: that it needs on them; "" = none.
        home: shared by samples that had best share a replica when none has their weights, or their adapter.
        blocks: of its prompt, each named with all before it; the first stands for the snapshot.
        prompt_tokens, answer_tokens: its work, counted as Load.tokens.
        sequences: that it has generated.
        request_id: of no other sample.
        routed_experts: its answer has the experts of its tokens.
    """

    weights: str
    adapter: str
    home: bytes
    blocks: tuple[int, ...]
    prompt_tokens: int
    answer_tokens: int
    sequences: int
    request_id: str
    routed_experts: bool = False


def wanted(
    model_id: str,
    version: int,
    full: bool,
    namespace: str,
    prompt: bytes,
    sequences: int,
    max_tokens: int | None,
    request_id: str,
    *,
    routed_experts: bool = False,
) -> Wanted:
    """What a sample of a snapshot wants; model_id "" = the base model.

    Versions of one full model share a home, so that a new one takes the place of the one before.

    Args:
        namespace: whose cached keys and values it may use.
        prompt: int32 token ids.
        max_tokens: of each sequence; None = to the end of the context.
    """
    snapshot, name = f"{model_id}\0{version}", f"{model_id}@{version}"
    blocks = prompt_blocks.chain(f"{snapshot}\0{namespace}".encode(), prompt)
    home = _digest(model_id.encode() if full else snapshot.encode())
    # The cache keeps no experts, so each sequence computes the prompt.
    prompts = sequences if routed_experts else 1
    each = SEQUENCE_TOKENS if max_tokens is None else min(max_tokens, SEQUENCE_TOKENS)
    return Wanted(
        weights=name if full else "",
        adapter=name if model_id and not full else "",
        home=home,
        blocks=blocks,
        prompt_tokens=prompts * (len(prompt) // prompt_blocks.TOKEN_BYTES),
        answer_tokens=sequences * each,
        sequences=sequences,
        request_id=request_id,
        routed_experts=routed_experts,
    )


def seen(record: ServiceRecord, wanted: Wanted, placements: Placements) -> Replica:
    """A replica as it is to a sample, by what it announces and what was sent there."""
    name = record.incarnation
    needed = placements.adapters(name) if wanted.adapter else set[str]()
    return Replica(
        name,
        placements.load(name),
        placements.known(name, wanted.blocks),
        record.weights,
        record.max_sequences,
        waits(wanted.adapter, needed, record.adapter_slots),
    )


def spared(wanted: Wanted, known_blocks: int) -> int:
    """What it is worth, in tokens of work, that a replica knows so many of a sample's blocks."""
    cached = _cached(wanted, known_blocks)
    is_known = cached > 0 or (known_blocks > 0 and wanted.adapter != "")
    return KNOWN_TOKENS + CACHED_WORTH * cached if is_known else 0


def work(wanted: Wanted, known_blocks: int) -> Load:
    """What a sample is to a replica that knows so many of its blocks."""
    tokens = wanted.prompt_tokens - _cached(wanted, known_blocks) + wanted.answer_tokens
    return Load(tokens, wanted.sequences)


def waits(adapter: str, needed: Set[str], slots: int) -> bool:
    """Whether a sample would wait for a slot of its adapter.

    Args:
        adapter: that it needs; "" = none.
        needed: by what is under way at the replica, in slots or in line for them.
        slots: that it has; 0 = not known.
    """
    return bool(adapter) and 0 < slots < len(needed | {adapter})


def choose(replicas: Sequence[Replica], wanted: Wanted) -> Replica | None:
    """The replica to use; None when there is none."""
    if not replicas:
        return None
    if all(replica.weights != wanted.weights for replica in replicas):
        # Rendezvous hashing: when a replica comes or goes, only the models it wins or loses move.
        best = max(replicas, key=lambda replica: _weight(replica, wanted.home))
        idlest = min(replicas, key=lambda replica: (replica.load.tokens, _weight(replica, wanted.home)))
        return best if best.load.tokens <= idlest.load.tokens + SWAP_TOKENS else idlest
    # One that would have to make room first takes nobody from those that need not.
    at_hand = [replica for replica in replicas if _is_at_hand(replica, wanted)] or replicas
    fewest = min(replica.load.sequences for replica in at_hand)
    costs = [_cost(replica, wanted, fewest) for replica in replicas]
    lowest = min(costs)
    equal = [replica for replica, cost in zip(replicas, costs, strict=True) if cost == lowest]
    common = _in_common(wanted, max(replica.known for replica in equal))
    return min(equal, key=lambda replica: _weight(replica, common))


def _in_common(wanted: Wanted, known_blocks: int) -> bytes:
    """What samples have in common that go to the same one of equal replicas, of which none knows more than so
    many of this one's blocks: an adapter that none has loaded, the next block of the prompt, or nothing."""
    if wanted.adapter and not known_blocks:
        return wanted.home
    # The first block stands for the snapshot.
    new = wanted.blocks[max(known_blocks, 1) :]
    return _digest(str(new[0]).encode() if new else wanted.request_id.encode())


def _cached(wanted: Wanted, known_blocks: int) -> int:
    if wanted.routed_experts:
        return 0
    # The first block stands for the snapshot.
    return max(0, known_blocks - 1) * prompt_blocks.BLOCK_TOKENS


def _cost(replica: Replica, wanted: Wanted, fewest: int) -> int:
    swap = 0 if _is_at_hand(replica, wanted) else SWAP_TOKENS
    saved = 0 if _crowded(replica, fewest) else spared(wanted, replica.known)
    return replica.load.tokens - saved + swap


def _is_at_hand(replica: Replica, wanted: Wanted) -> bool:
    """Whether it neither has to swap its engine's weights nor to free a slot."""
    return replica.weights == wanted.weights and not replica.waits


def _crowded(replica: Replica, fewest: int) -> bool:
    """Whether it generates so many sequences, and another one only `fewest`, that its cache keeps nobody.

    Sequences are counted, not tokens: they are what a replica takes on a number of, and a conversation that
    once began anew is many tokens of work to the replica that it goes to, which would drive out the next."""
    most = replica.max_sequences
    return bool(most) and replica.load.sequences - fewest > max(most // 2, FEW_SEQUENCES)


def _weight(replica: Replica, key: bytes) -> bytes:
    return _digest(replica.id.encode(), key)


def _digest(data: bytes, key: bytes = b"") -> bytes:
    return hashlib.blake2b(data, key=key, digest_size=16).digest()
