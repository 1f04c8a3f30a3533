"""Which experts the layers of a step give tokens to, for requests that ask for them (V1 model runner).

vLLM has them as a setting of the engine for all requests, and on its V2 model runner alone. Here its routers
tell what they choose, in steps with a request that asks, and the rows of such requests leave with the step's
output, each with the place of its first token. Nothing is kept from step to step.

Invariant: a row is what the router chose in the step that computed the token, in this very request; a step
without a request that asks does nothing else than without this.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from vllm.distributed.aux_output_connector.connector import AuxRequestOutput
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

from services.common.contract.experts.routing import Routing
from services.sampler.worker.prompt_scores import ROUTED_KEY, asked


class RoutedExperts:
    """Hooks into a worker's V1 GPUModelRunner or CPUModelRunner.

    Args:
        runner: it computes a step layer by layer, as Python calls them: nothing is compiled or replayed.
        routers: of its model's routed layers, in order.
    """

    def __init__(self, runner: Any, routers: list[Any], routing: Routing) -> None:
        self._runner, self._dtype = runner, routing.dtype
        self._chosen: list[np.ndarray | None] = [None] * routing.layers
        self._listens = False
        self._answers: dict[str, AuxRequestOutput] = {}
        self._execute, self._sample_tokens = runner.execute_model, runner.sample_tokens
        runner.execute_model, runner.sample_tokens = self._execute_and_take, self._sample_and_answer
        for number, router in enumerate(routers):
            router.set_capture_fn(partial(self._take, number))

    def _take(self, layer: int, chosen: torch.Tensor) -> None:
        if self._listens:
            self._chosen[layer] = chosen.numpy().astype(self._dtype)

    def _execute_and_take(self, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        asking = self._asking(scheduled)
        if not asking:
            return self._execute(scheduled, *args, **kwargs)
        self._listens = True
        try:
            result = self._execute(scheduled, *args, **kwargs)
        finally:
            self._listens = False
        layers = [chosen for chosen in self._chosen if chosen is not None]
        if len(layers) < len(self._chosen):
            raise RuntimeError(f"{len(layers)} of {len(self._chosen)} routed layers told their experts")
        self._answers = {name: self._rows(name, count, layers) for name, count in asking.items()}
        self._chosen = [None] * len(self._chosen)
        return result

    def _asking(self, scheduled: Any) -> dict[str, int]:
        """Of a step's requests that ask, how many tokens it computes."""
        new = {request.req_id: request.sampling_params for request in scheduled.scheduled_new_reqs}
        return {
            name: count
            for name, count in scheduled.num_scheduled_tokens.items()
            if asked(new[name] if name in new else self._runner.requests[name].sampling_params, ROUTED_KEY)
        }

    def _rows(self, name: str, count: int, layers: list[np.ndarray]) -> AuxRequestOutput:
        index = self._runner.input_batch.req_id_to_index[name]
        first = int(self._runner.query_start_loc.np[index])
        rows = np.stack([chosen[first : first + count] for chosen in layers], axis=1)
        return AuxRequestOutput(int(self._runner.requests[name].num_computed_tokens), rows)

    def _sample_and_answer(self, *args: Any, **kwargs: Any) -> Any:
        output = self._sample_tokens(*args, **kwargs)
        if self._answers:
            # With asynchronous scheduling the output is wrapped until its tokens are on the host.
            result = getattr(output, "_model_runner_output", output)
            result.aux_output_connector_output, self._answers = self._answers, {}
        return output


def install(runner: Any) -> Routing | None:
    """Has a worker tell them, and says how its model routes; None: it cannot, or routes nothing."""
    config = runner.parallel_config
    # Elsewhere a step is a graph that was compiled and captured before this is here, and a stage has only
    # some of the layers.
    if runner.device.type != "cpu" or config.pipeline_parallel_size > 1:
        return None
    layers = sorted(_routed_layers(runner.get_model().modules()), key=lambda layer: layer.layer_id)
    routers = [layer.router for layer in layers if not layer.is_monolithic]
    shapes = {
        (router.top_k, router.global_num_experts) for router in routers if isinstance(router, BaseRouter)
    }
    if len(routers) < len(layers) or len(shapes) != 1:
        return None
    routing = Routing(len(routers), *shapes.pop())
    RoutedExperts(runner, routers, routing)
    return routing


def _routed_layers(modules: Iterable[torch.nn.Module]) -> Iterable[Any]:
    return (module for module in modules if isinstance(module, MoERunner))
