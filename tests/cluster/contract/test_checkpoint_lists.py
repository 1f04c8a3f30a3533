"""Runs, checkpoints and sessions through the SDK's RestClient and through its command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker

from tests.cluster.conftest import BASE_MODEL, Cluster

STRANGER = "tml-a-stranger-of-the-lists"


@pytest.fixture(scope="module")
def stranger(cluster: Cluster) -> tinker.RestClient:
    """Somebody with another API key."""
    with (cluster.data_dir / "api_key").open("a") as keys:
        keys.write(f"{STRANGER} stranger-of-the-lists\n")
    deadline, known = time.monotonic() + 120, 0
    while known < 32:
        # Each gateway reads the file again within a few seconds; so many answers are hardly of one alone.
        assert time.monotonic() < deadline
        url = f"{cluster.base_url}/api/v1/sessions"
        reply = httpx.get(url, headers={"x-api-key": STRANGER, "connection": "close"})
        known = known + 1 if reply.status_code == 200 else 0
        time.sleep(0.05)
    return tinker.RestClient(base_url=cluster.base_url, api_key=STRANGER)


def cli(cluster: Cluster, *arguments: str, fails: bool = False) -> Any:
    """Output of the tinker command: JSON, or with `fails` what it says."""
    environment = {**os.environ, "TINKER_BASE_URL": cluster.base_url, "TINKER_API_KEY": cluster.api_key}
    command = [str(Path(sys.executable).with_name("tinker")), "--format", "json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    said = done.stdout + done.stderr
    assert (done.returncode != 0) == fails, (done.returncode, said)
    if fails:
        return said
    return json.loads(done.stdout) if done.stdout.lstrip().startswith("{") else None


def test_checkpoints_and_runs_are_listed_with_all_that_is_known_of_them(
    cluster: Cluster, training: tinker.TrainingClient
) -> None:
    rest = cluster.rest_client()
    training.save_state("a", ttl_seconds=7200, user_metadata={"step": "1"}).result()
    training.save_weights_for_sampler("s").result()
    training.save_weights_external("e").result()
    of_run = rest.list_checkpoints(training.model_id).result().checkpoints
    assert {one.checkpoint_type: one.checkpoint_id for one in of_run} == {
        "training": "weights/a",
        "sampler": "sampler_weights/s",
        "external": "external_weights/e",
    }
    assert all((one.size_bytes or 0) > 1000 for one in of_run)
    first = next(one for one in of_run if one.checkpoint_type == "training")
    assert first.user_metadata == {"step": "1"} and first.expires_at is not None
    page = rest.list_user_checkpoints(limit=2).result()
    assert page.checkpoints == of_run[:2] and page.cursor is not None and page.cursor.total_count >= 3
    rest.set_checkpoint_ttl_from_tinker_path(first.tinker_path, None).result()
    run = rest.get_training_run(training.model_id).result()
    assert run.last_checkpoint is not None and run.last_checkpoint.expires_at is None
    assert run.last_sampler_checkpoint is not None
    runs = rest.list_training_runs(limit=1).result()
    assert runs.training_runs[0].training_run_id == training.model_id
    session = training.model_id.split(":")[0]
    assert rest.get_session(session).result().training_run_ids == [training.model_id]
    assert rest.list_sessions(limit=1).result().sessions == [session]
    rest.assign_session_project(session, "a project").result()
    runs = rest.list_training_runs(project_id="a project").result()
    assert [one.training_run_id for one in runs.training_runs] == [training.model_id]
    info = rest.get_weights_info_by_tinker_path(first.tinker_path).result()
    assert (info.base_model, info.is_lora, info.lora_rank, info.train_unembed) == (BASE_MODEL, True, 8, True)


def test_what_is_published_can_be_continued_and_sampled_by_others(
    cluster: Cluster, training: tinker.TrainingClient, stranger: tinker.RestClient
) -> None:
    rest = cluster.rest_client()
    paths = [training.save_state("pub").result().path, training.save_weights_for_sampler("pub").result().path]
    other = cluster.service_client(STRANGER)
    with pytest.raises(tinker.APIStatusError, match="does not exist"):
        other.create_training_client_from_state(paths[0]).result()
    for path in paths:
        rest.publish_checkpoint_from_tinker_path(path).result()
    continued = other.create_training_client_from_state(paths[0]).result()
    assert continued.get_info().lora_rank == 8
    sampler = other.create_sampling_client(model_path=paths[1])
    prompt = tinker.types.ModelInput.from_ints([5, 6, 7])
    params = tinker.types.SamplingParams(max_tokens=3, temperature=0.0)
    before = sampler.sample(prompt, 1, params).result().sequences[0].tokens
    for path in paths:
        rest.unpublish_checkpoint_from_tinker_path(path).result()
    with pytest.raises(tinker.APIStatusError, match="does not exist"):
        stranger.get_weights_info_by_tinker_path(paths[0]).result()
    # What was opened stays, even when the checkpoint is deleted.
    rest.delete_checkpoint_from_tinker_path(paths[1]).result()
    assert sampler.sample(prompt, 1, params).result().sequences[0].tokens == before
    other.close("success").result()


def test_the_command_line_lists_checkpoints_and_says_what_is_wrong(
    cluster: Cluster, training: tinker.TrainingClient
) -> None:
    """As a program; every command of it is in the walk of test_compatibility.py."""
    path = training.save_state("cli").result().path
    (found,) = cli(cluster, "checkpoint", "list", "--run-id", training.model_id)["checkpoints"]
    assert found["tinker_path"] == path
    assert "not" in cli(cluster, "checkpoint", "info", f"{path}-other", fails=True)
