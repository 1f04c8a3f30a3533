"""A release is tested, scaled, disturbed, upgraded, rolled back, backed up, restored and uninstalled.

The tests are run in this order, each on what the one before left.
"""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.helm.rendered import CHART, ROOT
from tests.k8s import cluster
from tests.k8s.client import Client
from tests.k8s.cluster import NEW, RELEASE, Pod, helm, kubectl, pods, selector, wait_ready, wait_until
from tests.k8s.report import Report

pytestmark = [pytest.mark.timeout(7200), pytest.mark.usefixtures("release")]


@contextmanager
def disturbed(report: Report, client: Client, what: str) -> Iterator[None]:
    """Notes how long a disturbance lasted, and how long a client was without a result since it began."""
    client.wait_progress(time.time())
    since = time.time()
    with report.row(what) as row:
        started = time.monotonic()
        yield
        row.seconds = round(time.monotonic() - started, 1)
        client.wait_progress(time.time())
        row.training, row.sampling = client.longest("step", since), client.longest("sample", since)


def test_helm_test_fine_tunes(report: Report) -> None:
    with report.row("helm test"):
        output = helm("test", RELEASE, "--logs", "--timeout", f"{round(600 * cluster.SLOW)}s")
    assert "passed" in output
    assert "Succeeded" in output


def test_a_second_sampler_serves_the_current_version(report: Report, client: Client, directory: Path) -> None:
    first = pods("sampler")[0]
    with disturbed(report, client, "samplers scaled from 1 to 2, the second ready"):
        upgrade(directory, sampler__replicas=2)
        wait_ready("sampler", 2)
    # It came by a broadcast or by the volume; the one that had it before is taken away.
    with disturbed(report, client, "the first of two samplers deleted, until it is back"):
        kubectl("delete", "pod", first.name, "--wait=false")
        wait_ready("sampler", 2, but=[first])
    samples = [line for line in client.told() if line["what"] == "sample"]
    answers = {line["publish"]: set() for line in samples}
    for line in samples:
        answers[line["publish"]].add(tuple(line["tokens"]))
    # Greedy answers of one version are the same, whoever gave them.
    assert all(len(found) == 1 for found in answers.values()), answers


@pytest.mark.parametrize("component", ["gateway", "trainer", "redis"])
def test_a_deleted_pod_costs_a_client_a_pause_and_no_call(
    report: Report, client: Client, component: str
) -> None:
    found = pods(component)
    with disturbed(report, client, f"{component} deleted ({len(found)} of them)"):
        kubectl("delete", "pod", found[0].name, "--wait=false")
        wait_ready(component, len(found), but=found[:1])


def test_all_gateways_may_go_at_once(report: Report, client: Client) -> None:
    found = pods("gateway")
    with disturbed(report, client, "all gateways deleted"):
        kubectl("delete", "pod", *(one.name for one in found), "--wait=false")
        wait_ready("gateway", len(found), but=found)


def test_a_trainer_comes_back_when_its_node_takes_pods_again(report: Report, client: Client) -> None:
    """What a drain does: no new pods on the node, and the trainer gone. A single node is waited for."""
    trainer = pods("trainer")[0]
    node = kubectl("get", "pod", trainer.name, "-o", "jsonpath={.spec.nodeName}")
    alone = len(json.loads(kubectl("get", "nodes", "-o", "json"))["items"]) == 1
    with disturbed(report, client, "the trainer's node cordoned and the trainer deleted"):
        kubectl("cordon", node)
        try:
            kubectl("delete", "pod", trainer.name, "--wait=false")
            if alone:

                def others() -> list[Pod]:
                    return [one for one in pods("trainer") if one.uid != trainer.uid]

                wait_until(lambda: others() != [], "a next one")
                assert not any(one.ready for one in others())
        finally:
            kubectl("uncordon", node)
        wait_ready("trainer", 1, but=[trainer])


def test_an_upgrade_to_another_version_fails_no_request(
    report: Report, client: Client, directory: Path
) -> None:
    redis = untouched(pods("redis"))
    before = everything()
    with disturbed(report, client, "helm upgrade to another version of all images"):
        upgrade(directory, sampler__replicas=2, image__tag=NEW)
        rolled(before)
    assert untouched(pods("redis")) == redis, "Redis is not ours to restart"


def test_a_rollback_fails_no_request(report: Report, client: Client) -> None:
    redis = untouched(pods("redis"))
    before = everything()
    with disturbed(report, client, "helm rollback"):
        helm("rollback", RELEASE)
        rolled(before)
    assert untouched(pods("redis")) == redis, "Redis is not ours to restart"


def test_two_pods_are_one_trainer(report: Report, client: Client, directory: Path) -> None:
    with disturbed(report, client, "helm upgrade from one trainer.nodes to two"):
        upgrade(directory, sampler__replicas=2, trainer__nodes=2)
    # An upgrade has come back when the first is ready, which it is with the other alone.
    wait_ready("trainer-node", 1)
    for component, what in (("trainer-node", "second"), ("trainer", "first")):
        found, head = pods(component), pods("trainer")[0]
        with disturbed(report, client, f"the {what} of two nodes deleted, until both train again"):
            kubectl("delete", "pod", found[0].name, "--wait=false")
            wait_ready(component, 1, but=found)

            def again(before: Pod = head) -> bool:
                """The first node has started anew, as a pod or in one."""
                return any(
                    one.ready and (one.uid != before.uid or one.restarts > before.restarts)
                    for one in pods("trainer")
                )

            wait_until(again, "the first node")
    with disturbed(report, client, "helm upgrade back to one node"):
        upgrade(directory, sampler__replicas=2)
        wait_until(lambda: not pods("trainer-node"), "the second node to go")
        wait_ready("trainer", 1)


def test_a_backup_is_restored_into_another_release(
    report: Report, client: Client, tiny_model: Path, directory: Path
) -> None:
    backup = directory / "backup"
    with disturbed(report, client, "backup, and the trainer ready again"):
        script("backup.sh", str(backup))
        wait_ready("trainer", 1)
    kept = client.stop()
    with report.row("the same, with nobody who trains"):
        script("backup.sh", str(backup))
        wait_ready("trainer", 1)
    client.delete()
    everything_goes(report)
    with report.row("install anew, restore, everything ready"):
        cluster.install(directory)
        cluster.place_model(tiny_model)
        for component in ("redis", "gateway", "trainer", "sampler"):
            wait_until(lambda part=component: any(one.ready for one in pods(part)), component)
        script("restore.sh", str(backup))
        wait_ready("gateway", 2)
        wait_ready("trainer", 1)
        wait_ready("sampler", 1)
    with report.row("a client loads a state that was saved before"):
        found = Client("again", STATE=kept["path"])
        found.wait_running()
        assert found.wait_for("loaded")["loss"] == kept["loss"]
    # Redis keeps what it was given when it starts anew.
    with report.row("Redis deleted after the restore, and the state loaded once more"):
        redis = pods("redis")
        kubectl("delete", "pod", redis[0].name, "--wait=false")
        wait_ready("redis", 1, but=redis)
        found = Client("once-more", STATE=kept["path"])
        found.wait_running()
        assert found.wait_for("loaded")["loss"] == kept["loss"]


def test_an_uninstalled_release_leaves_its_volumes_alone() -> None:
    helm("uninstall", RELEASE)
    wait_until(lambda: not any(pods(one) for one in ("gateway", "trainer", "sampler", "redis")), "pods to go")
    kinds = "deployments,statefulsets,services,configmaps,secrets,serviceaccounts,networkpolicies,jobs"
    left = kubectl("get", kinds, "-l", f"app.kubernetes.io/instance={RELEASE}", "-o", "name")
    assert left.split() == []
    volumes = kubectl("get", "persistentvolumeclaims", "-o", "name").split()
    assert sorted(volumes) == [
        f"persistentvolumeclaim/data-{RELEASE}-redis-0",
        f"persistentvolumeclaim/{RELEASE}-data",
    ]


def upgrade(directory: Path, **more: object) -> None:
    timeout = f"{round(900 * cluster.SLOW)}s"
    arguments = cluster.values(directory, **more)
    helm("upgrade", RELEASE, str(CHART), *arguments, "--wait", "--timeout", timeout)


def everything() -> dict[str, list[Pod]]:
    """The pods that an upgrade replaces, by their component."""
    return {component: pods(component) for component in ("gateway", "trainer", "sampler")}


def rolled(before: dict[str, list[Pod]]) -> None:
    """Waits until every pod is another one than before, and ready."""
    for component, found in before.items():
        wait_ready(component, len(found), but=found)


def untouched(found: list[Pod]) -> list[tuple[str, int]]:
    """What stays as it is while nobody restarts them."""
    return [(one.uid, one.restarts) for one in found]


def script(name: str, target: str) -> None:
    path = ROOT / "deploy" / "k8s" / name
    command = shlex.join(cluster.kubectl_command())
    cluster.run([str(path), RELEASE, target], seconds=1800, env={**os.environ, "KUBECTL": command})


def everything_goes(report: Report) -> None:
    # helm's own pod of `helm test` is no part of the release.
    kubectl("delete", "pod", "-l", selector("test"), "--ignore-not-found")
    with report.row("helm uninstall, until every pod is gone"):
        helm("uninstall", RELEASE)
        label = f"app.kubernetes.io/instance={RELEASE}"
        wait_until(lambda: not kubectl("get", "pods", "-l", label, "-o", "name"), "pods to go")
    kubectl("delete", "persistentvolumeclaims", "--all", "--wait=true")
