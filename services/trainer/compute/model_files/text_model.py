"""Which causal language model there is in a model's files.

Published models of some families read pictures too: what is trained is the text model in them, as what a
sampler serves.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any, NamedTuple

from huggingface_hub.errors import StrictDataclassError

from services.common.contract.errors import InvalidRequest
from services.trainer.compute.model_files.dequantized import read_whole

_OF_BOTH = {
    r"^(model\.language_model|language_model\.model)\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
}
_SCALE = re.compile(r"\.weight_scale[^.]*$|(gate_up|down|gate|up)_proj_scales$")
"""Of a weight. What scales inputs of quantised linears is of no use where these are not."""

_NEEDED = "hidden_size", "num_attention_heads", "vocab_size"


class TextModel(NamedTuple):
    """How transformers is to load it.

    Attributes:
        kind: its class.
        config: its configuration.
        names: what its weights are called in files of a model that reads pictures too, in both layouts that
            there are, and what in the model; None: their names are the model's.
    """

    kind: Any
    config: Any
    names: dict[str, str] | None


def text_model(model_path: str, *, sharded: bool = False) -> TextModel:
    """That of a directory or hub id.

    Args:
        sharded: it is loaded under ZeRO-3.

    Raises:
        InvalidRequest: there is none that transformers knows, it does not say how many tokens it takes or how
            large it is, or its files are quantised in a way that is not read.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    try:
        whole = AutoConfig.from_pretrained(model_path, trust_remote_code=False)
    except (ValueError, StrictDataclassError) as error:
        # Of a contradiction within, the library says only in which of its functions it was found.
        words = str(error.__cause__ or error).splitlines()[0].rstrip(" .")
        raise InvalidRequest(
            f"{model_path}: transformers cannot read what kind of model it is: {words}; mend its config.json "
            "or use a model whose model_type the installed transformers knows: code that comes with a model "
            "is not run"
        ) from error
    config = whole.get_text_config(decoder=True)
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if kind is None:
        raise InvalidRequest(
            f"{model_path}: transformers has no causal language model of the kind {config.model_type}; use "
            "another model"
        )
    if not _says(config, "max_position_embeddings"):
        raise InvalidRequest(
            f"{model_path}: its config.json does not say how many tokens the model takes "
            "(max_position_embeddings); use another model"
        )
    if lacking := [name for name in _NEEDED if not _says(config, name)]:
        raise InvalidRequest(
            f"{model_path}: a model of the kind {config.model_type} has no {lacking[0]}, which the trainer "
            "counts its memory by; use another model"
        )
    read_whole(config, whole, model_path, sharded=sharded)
    return TextModel(kind, config, None if config is whole else _OF_BOTH)


def _says(config: Any, name: str) -> bool:
    """Whether a configuration has a size of this name. Some have a name with nothing, or -1, behind it."""
    return (getattr(config, name, None) or 0) > 0


def check_whole(model: Any, lacking: Collection[str], unread: Collection[str], model_path: str) -> None:
    """Refuses a model of which files lack weights, or whose weights were read without what scales them:
    transformers makes up the former, leaves out the latter, and says so in a table.

    Args:
        lacking: names of weights that files do not have.
        unread: names of what is in files and not in the model; under ZeRO-3, where no quantised weight is
            read, of all that is in files.

    Raises:
        InvalidRequest: it is one.
    """
    if lacking:
        raise InvalidRequest(
            f"{model_path}: its files lack {len(lacking)} weights of {type(model).__name__}, as "
            f"{min(lacking)}; fetch them again, or use another model"
        )
    parts = {name for name, _ in model.named_modules()}
    scales = [name for name in unread if _SCALE.search(name) and _part(name) in parts]
    if scales:
        raise InvalidRequest(
            f"{model_path}: its files are quantised in a form that transformers does not read: it leaves out "
            f"{min(scales)}; use the model that was quantised"
        )


def _part(name: str) -> str:
    """Of what part of a model a weight is, such as model.layers or lm_head."""
    module, _, _ = name.rpartition(".")
    return ".".join(module.split(".")[:2])
