"""When the demo succeeds, and how it finds and ends its cluster."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples.demo import cluster
from examples.demo import story as demo
from services.launcher import default_model
from tests.unit.docs.test_commands import wrong

FALLING = [6.0, 2.0, 0.5, 0.4]
SAME = [(0.5, 0.5), (0.25, 0.25)]
RISING = [0.4, 0.6, 0.8, 0.9]


def test_a_fallen_loss_an_exact_resume_and_a_risen_reward_are_success() -> None:
    assert demo.judge(FALLING, SAME, RISING) == []


def test_what_it_says_to_do_next_is_there() -> None:
    (command,) = re.findall(r"`\.venv/bin/tinsmith ([^`]+)`", demo.NEXT)
    assert wrong(command, whole=True) == ""
    readme = Path(demo.__file__).parents[2] / "README.md"
    assert "\n## Fifteen lines\n" in readme.read_text()


def test_a_loss_that_did_not_fall_is_a_failure() -> None:
    assert "loss did not fall" in demo.judge([2.0, 2.1, 1.9, 2.0], SAME, RISING)[0]


def test_a_loss_that_is_not_a_number_is_a_failure() -> None:
    assert demo.judge([6.0, 2.0, float("nan"), float("nan")], SAME, RISING) != []


def test_a_resumed_model_with_another_loss_is_a_failure() -> None:
    assert "resumed" in demo.judge(FALLING, [(0.5, 0.5), (0.25, 0.27)], RISING)[0]


def test_a_reward_that_fell_is_a_failure() -> None:
    assert "reward did not rise" in demo.judge(FALLING, SAME, [0.5, 0.4, 0.3, 0.4])[0]


def test_a_reward_that_was_full_from_the_start_is_no_failure() -> None:
    assert demo.judge(FALLING, SAME, [1.0, 1.0, 0.95, 1.0]) == []


def test_a_model_that_cannot_add_at_all_is_no_failure() -> None:
    assert demo.judge(FALLING, SAME, [0.0, 0.02, 0.0, 0.0]) == []


def test_the_endpoint_is_found_only_when_all_of_it_is_printed() -> None:
    printed = (
        "trainer-0 is ready after 9 s\n\nTinsmith is up (gRPC on 127.0.0.1:8101). In another terminal:\n\n"
        "    export TINKER_BASE_URL=http://127.0.0.1:8100\n    export TINKER_API_KEY=tml-abc_D-9\n"
    )
    assert cluster.find_endpoint(printed) == cluster.Endpoint(
        "http://127.0.0.1:8100", "127.0.0.1:8101", "tml-abc_D-9"
    )
    # The line with the key is still being written.
    assert cluster.find_endpoint(printed[:-1]) is None
    assert cluster.find_endpoint(printed[: printed.index("    export")]) is None


def test_a_cluster_that_ends_at_once_is_reported_with_its_output(tmp_path: Path) -> None:
    with pytest.raises(cluster.ClusterFailed, match="nowhere"):
        cluster.start("some/model", "./nowhere", tmp_path, lambda text: None)


def test_stopping_interrupts_and_waits() -> None:
    # A child of a shell's background job has SIGINT ignored.
    code = """
import signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    print("up", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    raise SystemExit(7)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    cluster.stop(process)
    assert process.returncode == 7


def test_a_directory_is_named_by_its_last_part_and_a_hub_id_by_itself(tmp_path: Path) -> None:
    (tmp_path / "my-model").mkdir()
    assert demo.base_model_name(str(tmp_path / "my-model")) == "my-model"
    assert demo.base_model_name("org/model") == "org/model"
    assert demo.base_model_name(None) == default_model.NAME
