"""Which variables of the environment are Tinsmith's, and what is said of one that is none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from services.common.contract import variables
from services.common.process import flags
from services.gateway import config as gateway
from services.launcher.settings.table import ROWS
from services.sampler import config as sampler
from services.trainer import config as trainer

ROOT = Path(__file__).resolve().parents[4]
EXAMPLES = {
    "SOME_FLAG": "stands for any, in docstrings",
    "LEAST_CONTEXT": "does not exist, in a test of the documents",
    "MAX_LORA_RNK": "is mistyped, in tests of programs",
}
SOURCES = ("services", "bench", "scripts", "deploy", "examples", "tests", "tinsmith_client", "docs")
_WRITTEN = re.compile(r"\bTINSMITH_([A-Z][A-Z0-9_]*[A-Z0-9])\b")


def test_those_of_flags_are_those_of_the_programs() -> None:
    tables = gateway.FLAGS, trainer.FLAGS, sampler.FLAGS
    names = {*ROWS, *(flag.name for table in tables for flag in flags.rows_of(table)), "model"}
    assert set(variables.OF_FLAGS) == {name.strip("-").upper().replace("-", "_") for name in names}


def test_all_that_the_sources_and_documents_name_are_known() -> None:
    paths = [path for folder in SOURCES for path in (ROOT / folder).rglob("*") if path.is_file()]
    paths = [path for path in paths if path.suffix != ".pyc" and path != Path(__file__)]
    paths += [ROOT / "Makefile", ROOT / "README.md"]
    named = {name for path in paths for name in _WRITTEN.findall(path.read_text(errors="ignore"))}
    assert len(named) > 30
    assert named - set(variables.OF_FLAGS) - set(variables.OTHERS) == set(EXAMPLES)


def test_each_that_is_none_is_told_with_the_nearest_one() -> None:
    environment = {
        "TINSMITH_GATEWAY": "2",
        "TINSMITH_SESION_END_AFTER": "60",
        "TINSMITH_ZZZ": "1",
        "TINSMITH_GATEWAYS": "2",
        "TINSMITHS": "3",
        "PATH": "/bin",
    }
    assert variables.mistakes(environment) == [
        "TINSMITH_GATEWAY is no variable of Tinsmith; did you mean TINSMITH_GATEWAYS?",
        "TINSMITH_SESION_END_AFTER is no variable of Tinsmith; did you mean TINSMITH_SESSION_END_AFTER?",
        "TINSMITH_ZZZ is no variable of Tinsmith; `tinsmith up --help` lists them",
    ]


def test_what_kubernetes_says_of_services_is_no_mistake() -> None:
    told = {
        "SERVICE_HOST": "10.0.0.1",
        "SERVICE_PORT": "8000",
        "SERVICE_PORT_HTTP": "8000",
        "PORT": "tcp://10.0.0.1:8000",
        "PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "PORT_8000_TCP_PROTO": "tcp",
        "PORT_8000_TCP_PORT": "8000",
        "PORT_8000_TCP_ADDR": "10.0.0.1",
    }
    for service in ("TINSMITH", "TINSMITH_GATEWAY", "TINSMITH_B2_REDIS"):
        assert variables.mistakes({f"{service}_{name}": value for name, value in told.items()}) == []


@pytest.mark.parametrize("name", ["TINSMITH_GRPC_PROT", "TINSMITH_METRIC_PORT", "TINSMITH_SERVICE_HOSTS"])
def test_a_mistyped_port_is_not_taken_for_one_of_kubernetes(name: str) -> None:
    assert len(variables.mistakes({name: "9000"})) == 1
