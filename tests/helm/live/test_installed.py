"""Upgrades of what cannot be changed are refused before anything is, with what to do instead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.helm.live.api import Cluster, cluster
from tests.helm.rendered import Values, pick, render

LABELS = {
    "app.kubernetes.io/name": "tinsmith",
    "app.kubernetes.io/instance": "tinsmith",
    "app.kubernetes.io/component": "data",
}


def claim(size: str = "100Gi") -> dict[str, Any]:
    spec = {"accessModes": ["ReadWriteOnce"], "storageClassName": "standard"}
    return {"metadata": {"labels": LABELS}, "spec": {**spec, "resources": {"requests": {"storage": size}}}}


@pytest.fixture
def installed() -> Iterator[Cluster]:
    """A cluster where the release is, by the defaults."""
    with cluster() as found:
        found.objects["persistentvolumeclaims"]["tinsmith-data"] = claim()
        redis = pick(render(), "StatefulSet", "tinsmith-redis")
        found.objects["statefulsets"]["tinsmith-redis"] = {"spec": redis["spec"]}
        yield found


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"data": {"accessMode": "ReadWriteMany"}}, "is there with ReadWriteOnce, which cannot be changed"),
        ({"data": {"storageClass": "nfs"}}, 'is there with "standard", which cannot be changed'),
        ({"data": {"size": "50Gi"}}, "data.size is 50Gi, and the volume tinsmith-data is there with 100Gi"),
        ({"redis": {"storage": {"size": "20Gi"}}}, "StatefulSet tinsmith-redis was made with 10Gi"),
        ({"redis": {"storage": {"storageClass": "ssd"}}}, 'redis.storage is 10Gi of class "ssd"'),
        ({"fullnameOverride": "another"}, "set fullnameOverride to tinsmith"),
    ],
    ids=str,
)
def test_what_cannot_be_changed_is_refused_with_what_to_do(
    installed: Cluster, values: Values, says: str
) -> None:
    assert says in installed.refusal(values)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"data": {"size": "1Ti", "storageClass": "standard"}},
        {"redis": {"storage": {"size": "10240Mi"}}},
        {"fullnameOverride": "another", "data": {"existingClaim": "mine"}},
    ],
    ids=str,
)
def test_what_can_be_changed_is_taken(installed: Cluster, values: Values) -> None:
    assert installed.refusal(values) == ""


def test_the_volume_of_another_release_is_none_of_this_one(installed: Cluster) -> None:
    labels = LABELS | {"app.kubernetes.io/instance": "other"}
    installed.objects["persistentvolumeclaims"] = {"other-data": claim() | {"metadata": {"labels": labels}}}
    installed.objects["statefulsets"] = {}
    assert installed.refusal({}) == ""
