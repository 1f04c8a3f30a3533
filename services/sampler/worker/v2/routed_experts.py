"""Which experts the layers of a step give tokens to, where vLLM itself tells them (V2 model runner).

vLLM's routers write what they choose into a tensor of the worker's, CUDA graphs or not. The first worker
copies it out with the tokens of a step, and keeps it in blocks, under names that the scheduler gives them
(engine/experts/own_rows.py), until the requests that ask (`asked_rows`) have it. Here it is said how the
model routes, rows of layers that do not route are left out, and a request may begin again with the step
before which it was given up: vLLM itself has zeros for the former, and never does the latter (no report of
either was found).

Invariant: what leaves has a row for each routed layer of the model, in its order, and for no other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.aux_output_connector.connector import AuxOutputConnectorMetadata, AuxRequestOutput
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import RoutedExpertsCaptureSource
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

from services.common.contract.experts.routing import Routing
from services.sampler.worker.v2 import asked_rows


@dataclass
class StepMetadata(AuxOutputConnectorMetadata):
    """What vLLM's worker is told with a step. `anew`: requests of `requests` that were given up since the
    last step, with whose rows nothing more is done."""

    anew: tuple[str, ...] = ()


def install(runner: Any) -> Routing | None:
    """Has a worker with vLLM's V2 GPUModelRunner, which has no requests yet, tell them as a sample does, and
    says how its model routes; None: vLLM was not asked for them, or the layers do not route alike."""
    if (connector := runner.aux_output_connector) is None:
        return None
    model = runner.vllm_config.model_config
    total, top_k = connector._capturer.shape_per_token
    routing = Routing(0, top_k, model.get_num_experts())
    layers = _routed(runner.get_model().modules(), routing)
    if not layers or len(set(layers)) < len(layers):
        return None
    _begin_anew(connector)
    asked_rows.install(connector)
    if layers != list(range(total)):
        _leave_out(connector, layers)
    return Routing(len(layers), routing.top_k, routing.experts)


def _routed(modules: Iterable[torch.nn.Module], routing: Routing) -> list[int]:
    """Numbers of the layers that route, in order; none where some do so otherwise than is said of all."""
    layers = []
    for module in modules:
        if isinstance(module, MoERunner):
            router = module.router
            alike = (routing.top_k, routing.experts)
            if isinstance(router, BaseRouter) and (router.top_k, router.global_num_experts) != alike:
                return []
        elif not isinstance(module, RoutedExpertsCaptureSource):
            continue
        layers.append(int(module.layer_id))
    return sorted(layers)


def _begin_anew(connector: Any) -> None:
    begin_step = connector.begin_step

    def begun(metadata: Any) -> None:
        if metadata is not None and metadata.anew:
            # vLLM refuses a step with requests that end and run in it: so they end before it.
            begin_step(AuxOutputConnectorMetadata(metadata.generation, {}, {}, metadata.anew))
        begin_step(metadata)

    connector.begin_step = begun


def _leave_out(connector: Any, layers: list[int]) -> None:
    """vLLM has a row for every layer of a model, of zeros where it does not route."""
    process_output = connector.process_output

    def processed(pending: Any) -> dict[str, AuxRequestOutput]:
        outputs = process_output(pending)
        return {
            name: AuxRequestOutput(output.token_start, output.rows[:, layers])
            for name, output in outputs.items()
        }

    connector.process_output = processed
