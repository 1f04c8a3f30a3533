"""The base models of this cluster as a gateway judges requests by them.

Invariant: what was ever configured or announced of a base model holds until an operator retires it, so a
request is judged the same way by every gateway, whether or not a trainer or sampler is alive at that moment.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from services.common.contract.base_weights import weights_of
from services.common.contract.errors import InvalidRequest, Starting
from services.common.contract.experts.routing import Routing
from services.common.state.known_models import Facts, KnownModel
from services.common.state.registry import View, facts
from services.gateway.cluster.discovery import Discovery

_STALE_S = 3.0
"""A view this old is one that cannot be refreshed in the background; then a request says why."""
_AGAIN_S = 0.1
_VARIANT = re.compile(r"(?P<name>.+):peft:(?P<context>[1-9][0-9]{0,8})")
"""How the SDK's users ask for a base model with a context length."""


@dataclass(frozen=True)
class BaseModel:
    """What the gateway knows of a base model.

    Attributes:
        name: what users pass as base_model.
        model_path: directory or hub id of weights and tokenizer.
        arch: architecture name. All but the name are empty or 0 until a trainer or sampler said them once.
        vocab_size: token ids are 0 .. vocab_size - 1.
        context_length: most tokens of a sequence.
        max_sequence_tokens: of the longest sequence that the memory of its trainers holds in training; 0 =
            not said.
        max_forward_tokens: of the longest that only runs forward, the same.
        one_rank_tokens: of the longest that one rank of a trainer holds, where ranks compute longer ones
            together; 0 = they do not.
        micro_batch_tokens: that its trainers compute several sequences of at once, the fewest; what one
            operation comes to is cut so; 0 = not said.
        max_operation_tokens: of all sequences of one operation, the same.
        trainer_ranks: of its trainers, the fewest; what one operation comes to is cut for so many.
        max_train_rank: largest LoRA rank its trainers take; 0 = no limit of their own.
        max_sample_rank: largest LoRA rank that those of its samplers take which run adapters; 0 = no limit of
            their own.
        trainable: it has a trainer, which may be away at present.
        sampleable: it has a sampler, which may be away at present.
        samples_full_models: one of its samplers can run fully fine-tuned models, as far as they said.
        samples_adapters: one of its samplers can run adapters, as far as they said.
        sampled_routing: how it routes tokens to experts, where one of its samplers tells which have a
            sample's tokens.
        tells_of_adapters: one that tells it can run adapters too; `tells_of_full_models`: the same.
        trained_routing: how it routes, where all of its trainers compute with experts that they are given.
        trainer_seen: a trainer said once what it takes; `sampler_seen`: the same.
    """

    name: str
    model_path: str = ""
    arch: str = ""
    vocab_size: int = 0
    context_length: int = 0
    max_sequence_tokens: int = 0
    max_forward_tokens: int = 0
    one_rank_tokens: int = 0
    micro_batch_tokens: int = 0
    max_operation_tokens: int = 0
    trainer_ranks: int = 1
    max_train_rank: int = 0
    max_sample_rank: int = 0
    trainable: bool = False
    sampleable: bool = False
    samples_adapters: bool = True
    samples_full_models: bool = True
    sampled_routing: Routing | None = None
    tells_of_adapters: bool = False
    tells_of_full_models: bool = False
    trained_routing: Routing | None = None
    trainer_seen: bool = False
    sampler_seen: bool = False

    @property
    def tokenizer_id(self) -> str:
        """What AutoTokenizer.from_pretrained takes: the hub id, also for a directory of the hub's
        local cache, else the local directory; empty while neither is known."""
        return weights_of(self.model_path)


def merge(view: View) -> dict[str, BaseModel]:
    """Base models by name, without those that are retired.

    Where live processes of one kind differ in a limit, the smallest holds; while none is alive, what one
    announced last.
    """
    training, sampling = _announced(view, "trainer"), _announced(view, "sampler")
    return {
        name: _base_model(
            view.base_models.get(name) or KnownModel(name), training.get(name, []), sampling.get(name, [])
        )
        for name in {*view.base_models, *training, *sampling}
        if name in training or name in sampling or not view.base_models[name].retired
    }


def _announced(view: View, kind: str) -> Mapping[str, list[Facts]]:
    found: dict[str, list[Facts]] = {}
    for record in view.services.get(kind, ()):
        found.setdefault(record.base_model, []).append(facts(record))
    return found


def _base_model(known: KnownModel, trainers: Sequence[Facts], samplers: Sequence[Facts]) -> BaseModel:
    training = trainers or ([known.trainer] if known.trainer is not None else [])
    sampling = samplers or ([known.sampler] if known.sampler is not None else [])
    both = [*training, *sampling]
    telling = [one for one in sampling if one.routing]
    return BaseModel(
        name=known.name,
        model_path=both[0].model_path if both else "",
        arch=both[0].arch if both else "",
        vocab_size=_smallest(one.vocab_size for one in both),
        context_length=_smallest(one.context_length for one in both),
        max_sequence_tokens=_smallest(one.max_sequence_tokens for one in training),
        max_forward_tokens=_smallest(one.max_forward_tokens for one in training),
        one_rank_tokens=_smallest(one.one_rank_tokens for one in training),
        micro_batch_tokens=_smallest(one.micro_batch_tokens for one in training),
        max_operation_tokens=_smallest(one.max_operation_tokens for one in training),
        trainer_ranks=_smallest(one.world_size for one in training) or 1,
        max_train_rank=_smallest(one.max_lora_rank for one in training),
        max_sample_rank=_smallest(one.max_lora_rank for one in sampling if one.adapts),
        trainable=known.trained or bool(trainers),
        sampleable=known.sampled or bool(samplers),
        samples_adapters=not sampling or any(one.adapts for one in sampling),
        samples_full_models=not sampling or any(one.full_models for one in sampling),
        sampled_routing=telling[0].routing if telling else None,
        tells_of_adapters=any(one.adapts for one in telling),
        tells_of_full_models=any(one.full_models for one in telling),
        trained_routing=training[0].routing if len({one.routing for one in training}) == 1 else None,
        trainer_seen=bool(training),
        sampler_seen=bool(sampling),
    )


def _smallest(values: Iterable[int]) -> int:
    """The smallest limit; 0 where none is set."""
    return min((value for value in values if value), default=0)


class BaseModels:
    """Base models by name."""

    def __init__(self, discovery: Discovery) -> None:
        self._discovery = discovery
        self._view: View | None = None
        self._served: dict[str, BaseModel] = {}

    async def served(self) -> list[BaseModel]:
        """Every base model that is served, by name, whether its services are alive or not."""
        await self._look(_STALE_S)
        return [self._served[name] for name in sorted(self._served)]

    async def get(self, name: str) -> BaseModel:
        """What is known of a base model. `name:peft:N` is `name`, if its context length is at least N.

        Raises:
            InvalidRequest: this cluster does not serve the name; names those it does. Or not with so long a
                context.
            Starting: it serves none yet.
        """
        return await self._find(name, lambda model: True)

    async def may_share_weights(self, first: str, second: str) -> bool:
        """False when both registered names are known to stand for different weights.

        True when they are one name, or two of the same weights, or when what one of them is was never said or
        is no longer known: then the trainer, which knows what a checkpoint was trained on, decides.
        """
        if first == second:
            return True
        await self._look(_STALE_S)
        both = [self._served.get(name, BaseModel(name)).tokenizer_id for name in (first, second)]
        return both[0] == both[1] or not all(both)

    async def trainable(self, name: str) -> BaseModel:
        """A base model that models can be created on. Raises as `get`, and InvalidRequest when it is only
        sampled."""
        model = await self._find(name, lambda model: model.trainable)
        if not model.trainable:
            names = _names(known.name for known in self._served.values() if known.trainable)
            raise InvalidRequest(
                f"base model {name!r} has no trainer here; trainable base models: {names}",
                "not_trainable",
                field="base_model",
            )
        return model

    async def sampleable(self, name: str) -> BaseModel:
        """A base model that can be sampled. Raises as `get`, and InvalidRequest when it is only trained."""
        model = await self._find(name, lambda model: model.sampleable)
        if not model.sampleable:
            names = _names(known.name for known in self._served.values() if known.sampleable)
            raise InvalidRequest(
                f"base model {name!r} has no sampler here; sampleable base models: {names}",
                "not_sampleable",
                field="base_model",
            )
        return model

    async def in_training(self, name: str) -> BaseModel:
        """A base model whose limits for training are known. Raises as `get`.

        Raises:
            Starting: its first trainer still loads.
        """
        model = await self._find(name, lambda model: model.trainer_seen)
        if not model.trainer_seen:
            raise Starting(_first("trainer", name))
        return model

    async def in_sampling(self, name: str) -> BaseModel:
        """A base model whose limits for sampling are known. Raises as `get`.

        Raises:
            Starting: its first sampler still loads.
        """
        model = await self._find(name, lambda model: model.sampler_seen)
        if not model.sampler_seen:
            raise Starting(_first("sampler", name))
        return model

    async def _find(self, name: str, wanted: Callable[[BaseModel], bool]) -> BaseModel:
        """A base model; looked for once more when it is not as it is wanted, for it may just have come."""
        for seconds in (_STALE_S, _AGAIN_S):
            view = await self._look(seconds)
            model = find(name, self._served)
            if model is not None and wanted(model):
                return model
        if model is not None:
            return model
        known = view.base_models.get(name)
        if known is not None and known.retired:
            raise retired(name, self._served)
        if not self._served:
            raise Starting("no trainer or sampler is ready yet; try again in a moment")
        raise InvalidRequest(
            f"base model {name[:200]!r} is not served here; use one of: {_names(self._served)}",
            "unknown_base_model",
            field="base_model",
        )

    async def _look(self, seconds: float) -> View:
        view = await self._discovery.fresh(seconds)
        if view is not self._view:
            self._view, self._served = view, merge(view)
        return view


def find(name: str, served: Mapping[str, BaseModel]) -> BaseModel | None:
    """The base model that a user's name stands for; None: there is none.

    Raises:
        InvalidRequest: it is one with a shorter context than the name asks for.
    """
    model = served.get(name)
    variant = _VARIANT.fullmatch(name) if model is None else None
    if variant is None:
        return model
    model = served.get(variant["name"])
    if model is not None and 0 < model.context_length < int(variant["context"]):
        raise InvalidRequest(
            f"base model {model.name!r} is served with a context length of {model.context_length}, not of "
            f"{variant['context']}; leave out ':peft:{variant['context']}'",
            "context_length_exceeded",
            field="base_model",
        )
    return model


def retired(name: str, served: Iterable[str] = ()) -> InvalidRequest:
    """The error of a request for a base model that an operator retired."""
    message = f"base model {name!r} was retired by the operator of this cluster"
    return InvalidRequest(
        f"{message}; use one of: {_names(served)}" if served else message, "base_model_retired"
    )


def _first(kind: str, name: str) -> str:
    return f"the {kind} for {name} is starting for the first time; try again when it has loaded the model"


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none at present"
