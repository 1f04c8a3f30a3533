"""Alerts fire in the case that they are for, and not in one beside it, by Prometheus' own evaluation."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from scripts.dashboards import FOLDER
from tests.monitoring.prometheus import program

ALERTS = FOLDER / "alerts.yaml"
HTTP = 'tinsmith_http_seconds_count{namespace="n",route="/api/v1/%s",status="%s"}'
RPC = 'tinsmith_rpc_seconds_count{namespace="n",method="/tinsmith.%s/%s",code="%s"}'
WORK = 'tinsmith_periodic_failures_%s{namespace="n",pod="gateway",work="sweep"}'
STARTED = 'process_start_time_seconds{namespace="n",pod="trainer",app_kubernetes_io_component="trainer"}'
FREE = 'tinsmith_volume_free_bytes{namespace="n",pod="trainer"}'
LOADED = 'tinsmith_model_loaded{namespace="n",pod="trainer"}'
IN_VAIN = 'tinsmith_models_tried_in_vain_total{namespace="n",pod="gateway"}'
LOST = 'tinsmith_models_lost_total{namespace="n",pod="gateway"}'
DURABLE = 'tinsmith_durable_snapshot_failures_total{namespace="n",pod="trainer"}'
ACCEPTED = (
    'tinsmith_rpc_seconds_bucket{namespace="n",method="/tinsmith.v1.TinsmithService/OptimStep",le="%s"}'
)
WAIT = 'tinsmith_operation_wait_seconds_bucket{namespace="n",pod="trainer",owner_class="%s",le="%s"}'

Series = dict[str, str]
"""Values of a series, one each minute, in promtool's notation."""


def waits(owner_class: str) -> Series:
    """Of operations, each of which waits for between five minutes and half an hour."""
    return {
        WAIT % (owner_class, "300.0"): "0x90",
        WAIT % (owner_class, "1800.0"): "0+60x90",
        WAIT % (owner_class, "+Inf"): "0+60x90",
    }


FIRES: list[tuple[str, Series]] = [
    (
        "TinsmithRequestsRefused",
        {HTTP % ("asample", "429"): "0+60x90", HTTP % ("retrieve_future", "200"): "0+6000x90"},
    ),
    (
        "TinsmithRequestsRefused",
        {
            RPC % ("v1.TinsmithService", "Sample", "RESOURCE_EXHAUSTED"): "0+60x90",
            HTTP % ("asample", "200"): "0+6000x90",
        },
    ),
    (
        "TinsmithStateNearlyFull",
        {'tinsmith_state_bytes{namespace="n"}': "90x90", 'tinsmith_state_max_bytes{namespace="n"}': "100x90"},
    ),
    ("TinsmithOperationsWait", waits("light")),
    (
        "TinsmithRequestsFail",
        {
            RPC % ("v1.TinsmithService", "GetResult", "UNAVAILABLE"): "0+60x90",
            HTTP % ("asample", "200"): "0+6000x90",
        },
    ),
    ("TinsmithModelNotLoaded", {LOADED: "0x30 _x5 0x60"}),
    ("TinsmithProcessRestarts", {STARTED: "1x30 2x2 _x5 3x2 _x5 4x20"}),
    # A work that hangs fails once in its deadline; what is done once a day, once in six hours.
    ("TinsmithModelsWait", {IN_VAIN: "0x40 1+1x50"}),
    ("TinsmithModelsLost", {LOST: "0x50 1x40"}),
    ("TinsmithDurableSnapshotsFail", {DURABLE: "0x20 1+1x70"}),
    ("TinsmithVolumeNearlyFull", {FREE: "9e9x90", LOADED: "1x90"}),
    ("TinsmithBackgroundWorkFails", {WORK % "in_a_row": "0x20 1x70", WORK % "total": "0x20 1x70"}),
    ("TinsmithBackgroundWorkFails", {WORK % "in_a_row": "0x90", WORK % "total": "0+1x90"}),
    (
        "TinsmithAcceptanceSlow",
        {
            ACCEPTED % ("5.0"): "0x90",
            ACCEPTED % ("10.0"): "0+60x90",
            ACCEPTED % ("+Inf"): "0+60x90",
        },
    ),
    ("TinsmithKeysFileWrong", {'tinsmith_keys_file_wrong_lines{namespace="n",pod="gateway"}': "0x20 1x70"}),
    ("TinsmithAuditDropped", {'tinsmith_audit_dropped_total{namespace="n",pod="gateway"}': "0x30 3x60"}),
    (
        "TinsmithWeightGroupsNotLeft",
        {'tinsmith_weight_groups_not_left_total{namespace="n",pod="trainer",why="late"}': "_x20 5x70"},
    ),
]
QUIET: list[tuple[str, Series]] = [
    ("TinsmithRequestsRefused", {HTTP % ("asample", "429"): "0+60x90", HTTP % ("asample", "200"): "0+90x90"}),
    (
        "TinsmithStateNearlyFull",
        {'tinsmith_state_bytes{namespace="n"}': "50x90", 'tinsmith_state_max_bytes{namespace="n"}': "100x90"},
    ),
    ("TinsmithOperationsWait", waits("heavy")),
    ("TinsmithModelsWait", {IN_VAIN: "0x40 6x50"}),
    ("TinsmithModelsLost", {LOST: "2x90"}),
    ("TinsmithDurableSnapshotsFail", {DURABLE: "0x50 1x40"}),
    ("TinsmithVolumeNearlyFull", {FREE: "11e9x90", LOADED: "1x90"}),
    ("TinsmithVolumeNearlyFull", {FREE: "0x90", LOADED: "0x90"}),
    ("TinsmithModelNotLoaded", {LOADED: "1x30 _x5 0x40"}),
    ("TinsmithProcessRestarts", {STARTED: "1x20 2x20 3x20"}),
    ("TinsmithBackgroundWorkFails", {WORK % "in_a_row": "0x50 9x5 0x20", WORK % "total": "0x50 9x40"}),
    (
        "TinsmithRequestsFail",
        {RPC % ("internal.v1.TrainerService", "Execute", "UNAVAILABLE"): "0+60x90"},
    ),
    ("TinsmithRequestsFail", {RPC % ("v1.TinsmithService", "GetResult", "RESOURCE_EXHAUSTED"): "0+60x90"}),
]


def check(directory: Path, alert: str, series: Series, firing: int) -> None:
    """Has promtool find that so many alerts of the name fire after an hour."""
    expected = [{"labels": "{}", "value": firing}] if firing else []
    asked = f'count(ALERTS{{alertname="{alert}", alertstate="firing"}})'
    case = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [{"expr": asked, "eval_time": "60m", "exp_samples": expected}],
    }
    written = directory / "case.yaml"
    written.write_text(
        yaml.safe_dump({"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": [case]})
    )
    command = [program("promtool"), "test", "rules", str(written)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("alert", "series"), FIRES)
def test_an_alert_fires_in_its_case(tmp_path: Path, alert: str, series: Series) -> None:
    check(tmp_path, alert, series, firing=1)


@pytest.mark.parametrize(("alert", "series"), QUIET)
def test_an_alert_is_quiet_in_a_case_beside_it(tmp_path: Path, alert: str, series: Series) -> None:
    check(tmp_path, alert, series, firing=0)
