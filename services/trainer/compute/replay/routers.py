"""Routers of a model that take their choice from outside.

A router of transformers computes scores of all experts, takes the largest top_k, and makes gates of their
scores, each family in a way of its own. Its own code runs here too, but that the experts which it takes are
the given ones: so the gates are those that the model gives to these experts, with its normalisation, and
gradients flow through them as ever.

Invariant: a model whose routers do otherwise than that is found by a trial with a router of its kind, and
takes nothing from outside.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from services.common.contract.experts.routing import Routing
from services.trainer.compute.lora.experts import find_experts

log = logging.getLogger(__name__)

OWN = -1
"""In the place of an id: the router chooses."""


class Replay:
    """The routers of one model.

    Args:
        model: whose routers take choices from outside from now on, if they can.

    Attributes:
        routing: how it routes; None: it takes none.
    """

    def __init__(self, model: Any) -> None:
        self.routing: Routing | None = None
        self._chosen: Tensor | None = None
        routers = list(_routers(model))
        shapes = {(router.top_k, router.num_experts) for router in routers}
        if not routers or len(shapes) > 1 or len(routers) != sum(1 for _ in find_experts(model)):
            return
        if not all(_takes(kind, model) for kind in {type(router) for router in routers}):
            log.warning("%s routes in a way of its own: it replays no experts", type(model).__name__)
            return
        self.routing = Routing(len(routers), *shapes.pop())
        for layer, router in enumerate(routers):
            self._hook(router, layer)

    @contextmanager
    def given(self, chosen: Tensor | None) -> Iterator[None]:
        """Has forward and backward passes within the context, which may compute a layer again, use experts.

        Args:
            chosen: of the batch's tokens, int32 [T, layers, top_k]; -1 = the router's own. None = all are.

        Raises:
            RuntimeError: the model takes none, as where its trial lacked the memory that another one's had.
        """
        if chosen is not None and self.routing is None:
            raise RuntimeError("this model takes no experts, and a batch was given some")
        self._chosen = chosen
        try:
            yield
        finally:
            self._chosen = None

    def _hook(self, router: Any, layer: int) -> None:
        plain = router.forward

        def forward(hidden: Tensor) -> Any:
            if self._chosen is None:
                return plain(hidden)
            return _routed(plain, hidden, self._chosen[:, layer], router.num_experts)

        router.forward = forward


class _Chooses(TorchFunctionMode):
    """Within it, what takes the largest `top_k` of all experts' scores of each token takes the given ones."""

    def __init__(self, chosen: Tensor, experts: int) -> None:
        super().__init__()
        self._chosen, self._shape = chosen, (chosen.shape[0], experts)
        self.times = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return made
        scores = args[0]
        if scores.shape != self._shape or made[1].shape != self._chosen.shape:
            return made
        self.times += 1
        ids = torch.where(self._chosen < 0, made[1], self._chosen.long())
        return torch.return_types.topk((scores.gather(-1, ids), ids))


def _routed(plain: Any, hidden: Tensor, chosen: Tensor, experts: int) -> Any:
    """What a router's own `forward` comes to with given choices, int32 [tokens, top_k].

    Raises:
        RuntimeError: it does not choose once for each token.
    """
    with _Chooses(chosen, experts) as choice:
        made = plain(hidden)
    if choice.times != 1:
        raise RuntimeError(f"a router chose {choice.times} times among {experts} experts")
    return made


def _routers(model: Any) -> Iterator[Any]:
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        if "weight" in own and hasattr(module, "top_k") and hasattr(module, "num_experts"):
            yield module


def _takes(kind: type[nn.Module], model: Any) -> bool:
    """Whether routers of a kind compute with the choice that they are given, by a trial with a random one."""
    generator = torch.Generator().manual_seed(0)
    try:
        router: Any = kind(model.config.get_text_config()).to("cpu", torch.float32).eval()
        for values in router.parameters():
            nn.init.normal_(values, generator=generator)
        hidden = torch.randn(8, router.weight.shape[-1], generator=generator)
        with torch.no_grad():
            _, gates, own = router(hidden)
            others = torch.rand(8, router.num_experts, generator=generator).topk(router.top_k).indices
            for given in (own.flip(-1), others):
                _, found, ids = _routed(router, hidden, given.int(), router.num_experts)
                if not torch.equal(ids, given) or found.shape != gates.shape:
                    return False
            _, again, _ = _routed(router, hidden, own.flip(-1).int(), router.num_experts)
            _, free, _ = _routed(router, hidden, torch.full_like(own, OWN).int(), router.num_experts)
    except Exception:
        log.info("a %s is not tried alone", kind.__name__, exc_info=True)
        return False
    return bool(torch.allclose(again, gates.flip(-1), rtol=1e-5, atol=1e-6) and torch.equal(free, gates))
