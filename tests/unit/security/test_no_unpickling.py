"""Nothing here reads a format that can run code: no pickle, and weights of safetensors alone."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SOURCES = [
    path
    for folder in ("services", "tinsmith_client", "deploy", "scripts", "examples")
    for path in (ROOT / folder).rglob("*.py")
]
FORBIDDEN = {"pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
# Of torch.distributed: they pickle what they carry.
OBJECTS = ("_object_list", "all_gather_object", "gather_object", "broadcast_object", "scatter_object")


def found_in(source: str) -> list[str]:
    """What in a source may unpickle something."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names if name.name.split(".")[0] in FORBIDDEN]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FORBIDDEN:
            found.append(str(node.module))
        elif isinstance(node, ast.Call):
            found += _in_call(
                ast.unparse(node.func), {keyword.arg: keyword.value for keyword in node.keywords}
            )
        elif isinstance(node, ast.Constant) and node.value == "VLLM_ALLOW_INSECURE_SERIALIZATION":
            found.append(str(node.value))
    return found


def _in_call(function: str, keywords: dict[str | None, ast.expr]) -> list[str]:
    def said(name: str) -> str:
        return ast.unparse(keywords[name]) if name in keywords else ""

    wrong = [function] if function.endswith(OBJECTS) else []
    if function == "torch.load" and said("weights_only") != "True":
        wrong.append("torch.load without weights_only")
    if said("trust_remote_code") not in ("", "False"):
        wrong.append(f"{function} with trust_remote_code")
    if said("allow_pickle") not in ("", "False"):
        wrong.append(f"{function} with allow_pickle")
    weights = function.startswith("AutoModel") and function.endswith(".from_pretrained")
    # GGUF is a format of tensors, too.
    if weights and said("use_safetensors") != "True" and "gguf_file" not in keywords:
        wrong.append(f"{function} without use_safetensors")
    return wrong


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from cloudpickle import loads",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "AutoModelForCausalLM.from_pretrained(path)",
        "dist.broadcast_object_list(things)",
        "AutoConfig.from_pretrained(path, trust_remote_code=True)",
        "numpy.load(path, allow_pickle=True)",
    ],
)
def test_what_unpickles_is_noticed(source: str) -> None:
    assert len(found_in(source)) == 1


def test_no_source_unpickles() -> None:
    assert len(SOURCES) > 200
    found = {str(path.relative_to(ROOT)): found_in(path.read_text()) for path in SOURCES}
    assert {path: wrong for path, wrong in found.items() if wrong} == {}


def test_the_engine_is_told_to_load_safetensors_alone() -> None:
    """Read, not run: importing vLLM takes longer than every other test here."""
    settings = ast.parse((ROOT / "services" / "sampler" / "engine" / "settings" / "arguments.py").read_text())
    given = {
        key.value: ast.unparse(value)
        for node in ast.walk(settings)
        if isinstance(node, ast.Dict)
        for key, value in zip(node.keys, node.values, strict=True)
        if isinstance(key, ast.Constant)
    }
    assert given["load_format"] == "'safetensors'"
    assert "trust_remote_code" not in given
