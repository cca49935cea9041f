"""The gateway of the Kubernetes base: keys, probes over HTTP, and policies about who may connect to whom."""

from __future__ import annotations

from pathlib import PurePosixPath

import pytest

from tests.support.kubernetes import BASE, WORKERS, Object, Workload, kustomize, of_kind, settings_of, workloads_of


@pytest.fixture(scope="module")
def objects() -> list[Object]:
    return kustomize(BASE)


@pytest.fixture(scope="module")
def workloads(objects: list[Object]) -> dict[str, Workload]:
    return workloads_of(objects)


@pytest.fixture(scope="module")
def services(objects: list[Object]) -> dict[str, Object]:
    return of_kind(objects, "Service")


def test_the_gateway_serves_the_workers_to_whoever_has_a_key(
    workloads: dict[str, Workload], services: dict[str, Object]
):
    settings, workload = settings_of(workloads["gateway"], "gateway").gateway, workloads["gateway"]
    assert settings.targets == (f"target:{workloads['target'].listen_port}",)
    assert settings.drafts == (f"draft:{workloads['draft'].listen_port}",)
    assert settings.http == f"0.0.0.0:{workload.listen_port}"
    (service_port,) = services["gateway"]["spec"]["ports"]
    assert service_port["targetPort"] == workload.container["ports"][0]["name"]
    assert not settings.allow_anonymous
    (mount,) = [each for each in workload.container["volumeMounts"] if each["name"] == "keys"]
    assert PurePosixPath(settings.api_key_file or "").parent == PurePosixPath(mount["mountPath"])
    assert mount["readOnly"]
    assert workload.spec["replicas"] > 1, "a node can be drained"


def test_the_gateway_is_asked_over_http_what_it_answers_without_a_key(workloads: dict[str, Workload]):
    container = workloads["gateway"].container
    asked = {kind: container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")}
    assert {kind: probe["path"] for kind, probe in asked.items()} == {
        "startup": "/health",
        "readiness": "/health",  # /ready fails while a target is away, for which requests wait
        "liveness": "/health",
    }
    assert {probe["port"] for probe in asked.values()} == {container["ports"][0]["name"]}
    startup, target = container["startupProbe"], workloads["target"].container["startupProbe"]
    window_s = startup["periodSeconds"] * startup["failureThreshold"]
    assert window_s >= target["periodSeconds"] * target["failureThreshold"], "it waits for the target"
    assert settings_of(workloads["gateway"], "gateway").orchestrator.retry < window_s


def _selects(selector: Object, labels: dict[str, str]) -> bool:
    return all(labels.get(name) == value for name, value in selector.get("matchLabels", {}).items()) and all(
        labels.get(each["key"]) in each["values"] for each in selector.get("matchExpressions", [])
    )


def test_only_the_gateway_and_the_job_reach_the_workers(objects: list[Object], workloads: dict[str, Workload]):
    policies = {name: item["spec"] for name, item in of_kind(objects, "NetworkPolicy").items()}

    def selected(selector: Object) -> set[str]:
        return {name for name, workload in workloads.items() if _selects(selector, workload.labels)}

    assert selected(policies["workers"]["podSelector"]) == set(WORKERS)
    rule, for_prometheus = policies["workers"]["ingress"]
    assert for_prometheus == {"from": [{"namespaceSelector": {}}], "ports": [{"port": "metrics"}]}
    assert policies["gateway"]["ingress"][1] == for_prometheus
    assert selected(rule["from"][0]["podSelector"]) == {"gateway", "orchestrate"}
    assert selected(policies["gateway"]["podSelector"]) == {"gateway"}
    to_workers, names = policies["gateway"]["egress"]
    assert selected(to_workers["to"][0]["podSelector"]) == set(WORKERS)
    assert {port["port"] for port in names["ports"]} == {53}
    for policy, name in (("workers", "target"), ("gateway", "gateway")):
        (allowed,) = policies[policy]["ingress"][0]["ports"]
        assert allowed["port"] == workloads[name].container["ports"][0]["name"]
