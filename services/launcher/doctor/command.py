"""`tinsmith doctor`."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from services.common.contract.errors import InvalidRequest
from services.launcher import plan
from services.launcher.doctor import facts, report, sizing
from services.launcher.doctor.facts import Facts
from services.launcher.doctor.sizing import PUBLISHED, Experts, LinearAttention, Load, Shape

_SIZE = re.compile(r"(\d+(?:\.\d+)?)([MB])", re.IGNORECASE)


def doctor(data_dir: Path, model: str | None) -> int:
    """Prints the report; 1 when no cluster can run here as things are.

    Raises:
        InvalidRequest: `model` is neither a size nor a directory with a model's configuration.
    """
    here = facts.gather(data_dir)
    print(report.show(here, shape_of(model) if model else None))
    return 1 if any(one.state == "bad" for one in report.findings(here)) else 0


def doubts(options: plan.Options, here: Facts) -> list[str]:
    """What is to be said of models that, by estimate, do not come up on this machine, each by itself.

    Nothing is said of one whose shape is not known without a download, nor where an option decides what takes
    how much or parts a model among devices: the estimate knows nothing of that.
    """
    caches = (options.kv_cache_gib or 0.0) * len(options.models) * options.samplers
    if options.device == "cpu" and caches * sizing.GIB > here.memory:
        each = f"--kv-cache-gib {options.kv_cache_gib:g}"
        room = f"{here.memory / sizing.GIB:.0f} GiB are here"
        return [f"{each} of every sampler is {caches:g} GiB, and {room}: give less, or fewer --samplers"]
    parted = options.zero_stage == 3 or options.sampler_tp * options.sampler_pp > 1 or options.samplers == 0
    said = options.kv_cache_gib is not None or options.sampler_memory is not None
    if parted or said or options.quantization != "auto":
        return []
    cuda = options.device == "cuda"
    usual = report.usual(cuda)
    load = replace(
        usual,
        item={"float32": 4, "bfloat16": 2}.get(options.dtype, usual.item),
        micro_batch_tokens=options.micro_batch_tokens or usual.micro_batch_tokens,
        max_rank=options.max_lora_rank,
        max_loras=options.max_loras,
        context=min(usual.context, options.max_context or usual.context),
    )
    # Several models on as many GPUs share them too.
    shared = not cuda or any(share is not None for share in plan.trainer_shares(options))
    found = [_doubt(model.source, here, cuda, load, shared) for model in options.models]
    return [doubt for doubt in found if doubt]


def _doubt(source: str, here: Facts, cuda: bool, load: Load, shared: bool) -> str:
    try:
        ((name, shape),) = shape_of(source).items()
    except InvalidRequest:
        return ""
    found = report.fit(shape, here, cuda, load, shared)
    if found.advice == "":
        return ""
    ask = f"tinsmith doctor {shlex.quote(name)} says what takes how much"
    if found.advice:
        return f"{source} may not come up as it is; by estimate it fits with {found.advice} ({ask})"
    trainer, sampler = (sum(part.values()) / sizing.GIB for part in (found.trainer, found.sampler))
    among = "for each" if not found.shared else "for both" if cuda else "for both, Redis and the system"
    room = f"{found.room / sizing.GIB:.0f} GiB are here {among}"
    return (
        f"{source} may not come up: by estimate it takes {trainer:.0f} GiB to train and {sampler:.0f} to "
        f"sample, and {room} ({ask})"
    )


_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_UNCOUNTED = (
    # Latent attention, linear attention, state spaces, experts of other forms.
    *("kv_lora_rank", "full_attention_interval", "linear_", "mamba_", "moe_num_experts", "expert_layer_"),
    "interleave_moe_layer_step",
)
"""Beginnings of settings that this arithmetic knows nothing of."""
_LINEAR = {"qwen3_next": True, "qwen3_5_text": False, "qwen3_5_moe_text": False}
"""Types of models whose linear attention it knows, and whether that makes all of a token by two linears."""
_OF_LINEAR = ("linear_", "full_attention_interval", "mamba_ssm_dtype")


def shape_of(model: str) -> dict[str, Shape]:
    """The shape of a directory's model, of a published one by its name, or of the published one nearest to a
    size such as 8B or 135M.

    Raises:
        InvalidRequest: it is none of these, or far from every size that is known.
    """
    by_name = {name.lower(): name for name in PUBLISHED}
    known = by_name.get(model.rpartition("/")[2].lower())
    config = Path(model).expanduser() / "config.json"
    if config.is_file():
        return {model: from_config(_read(config))}
    if known:
        return {known: PUBLISHED[known]}
    size = _SIZE.fullmatch(model)
    if size is None or not float(size[1]):
        raise InvalidRequest(
            f"{model!r} is no size such as 8B or 135M, no directory with a config.json, and none of "
            f"{', '.join(PUBLISHED)}"
        )
    parameters = int(float(size[1]) * {"M": 1e6, "B": 1e9}[size[2].upper()])
    nearest = sizing.nearest(parameters)
    if nearest is None:
        raise InvalidRequest(
            f"no model of about {model} is known here: give the directory of one, with its config.json"
        )
    return {f"{nearest}, the nearest to {model} whose shape is known": PUBLISHED[nearest]}


def _read(config: Path) -> dict[str, Any]:
    try:
        found = json.loads(config.read_text())
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{config} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise InvalidRequest(f"{config} is not the configuration of a model")
    return found


def from_config(config: dict[str, Any]) -> Shape:
    """The shape in a Hugging Face config.json.

    Raises:
        InvalidRequest: it is not that of a decoder with attention alone.
    """
    both, config = config, config.get("text_config", config)
    known = config.get("model_type") in _LINEAR
    uncounted = [
        name
        for name in config
        if name.startswith(_UNCOUNTED) and config[name] and not (known and name.startswith(_OF_LINEAR))
    ]
    if uncounted or ("linear_attention" in (config.get("layer_types") or ()) and not known):
        raise InvalidRequest(
            f"its config.json has {uncounted[0] if uncounted else 'linear attention'}, which is not counted "
            "here: start it with --memory-gib, and see what `tinsmith status` says is used"
        )
    try:
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        return Shape(
            layers=config["num_hidden_layers"],
            hidden=hidden,
            intermediate=config.get("intermediate_size") or config["moe_intermediate_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            vocabulary=config["vocab_size"],
            tied=config.get("tie_word_embeddings", both.get("tie_word_embeddings", False)),
            experts=_experts(config),
            linear=_linear(config) if known else None,
        )
    except KeyError as error:
        raise InvalidRequest(f"its config.json has no {error.args[0]}: not a language model") from error


def _linear(config: dict[str, Any]) -> LinearAttention:
    layers, every = config["num_hidden_layers"], config.get("full_attention_interval") or 4
    kinds = config.get("layer_types") or ()
    return LinearAttention(
        layers=kinds.count("linear_attention") if kinds else layers - layers // every,
        key_heads=config["linear_num_key_heads"],
        value_heads=config["linear_num_value_heads"],
        key_dim=config["linear_key_head_dim"],
        value_dim=config["linear_value_head_dim"],
        taps=config["linear_conv_kernel_dim"],
        fused=_LINEAR[config["model_type"]],
    )


def _experts(config: dict[str, Any]) -> Experts | None:
    """The routed experts of a configuration, by the names that families have for them."""
    count = next((config[name] for name in _COUNTS if config.get(name)), 0)
    if not count:
        return None
    if (config.get("decoder_sparse_step") or 1) > 1:
        raise InvalidRequest(
            "its config.json has experts in some layers only (decoder_sparse_step), which is not counted "
            "here: start it with --memory-gib, and see what `tinsmith status` says is used"
        )
    inner = config.get("moe_intermediate_size") or config["intermediate_size"]
    shared = config.get("shared_expert_intermediate_size") or inner * (config.get("n_shared_experts") or 0)
    dense = len(config.get("mlp_only_layers") or ()) or config.get("first_k_dense_replace", 0)
    active = config.get("num_experts_per_tok") or config["experts_per_token"]
    return Experts(count, active, inner, shared, dense)
