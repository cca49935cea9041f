"""The Kubernetes overlays with a target that is cut by layers: the stages follow one another and reach one another."""

from __future__ import annotations

import json
from importlib.resources import files

import pytest
from kubernetes_validate import utils as schemas

from tests.support.kubernetes import (
    BASE,
    STAGES,
    Object,
    Workload,
    kustomize,
    of_kind,
    settings_of,
    workloads_of,
)


@pytest.fixture(scope="module")
def objects() -> list[Object]:
    return kustomize(BASE.parent / "stages")


@pytest.fixture(scope="module")
def workloads(objects: list[Object]) -> dict[str, Workload]:
    return workloads_of(objects)


@pytest.mark.parametrize("overlay", ["stages", "stages-mtls"])
def test_the_overlay_adds_stages_to_the_base_and_changes_its_target_only(overlay: str):
    objects = kustomize(BASE.parent / overlay)
    for item in objects:
        schemas.validate(item, schemas.latest_version(), strict=True)
    plain = kustomize(BASE.parent / {"stages": "base", "stages-mtls": "mtls"}[overlay])
    for kind in ("Deployment", "Service", "NetworkPolicy", "Job"):
        added = {"NetworkPolicy": {"stages"}, "Job": set[str]()}.get(kind, set(STAGES))
        before, after = of_kind(plain, kind), of_kind(objects, kind)
        assert after.keys() - before.keys() == added
        changed = {name for name in before if after[name] != before[name]}
        assert changed == ({"target"} if kind == "Deployment" else set())


def test_the_layers_of_the_stages_follow_one_another_to_the_last(workloads: dict[str, Workload]):
    ranges = [settings_of(workloads[name], name).stage.layers for name in STAGES]
    config = json.loads(files("specsplit.model").joinpath("embedded/target/config.json").read_text(encoding="utf-8"))
    bounds = [tuple(map(int, layers.split(":"))) for layers in ranges if layers is not None]
    assert [start for start, _ in bounds] == [0, *(stop for _, stop in bounds[:-1])]
    assert bounds[-1][1] == config["num_hidden_layers"]
    assert {settings_of(workloads[name], name).stage.model for name in STAGES} == {"embedded"}


def test_the_target_and_each_stage_name_the_services_that_follow(objects: list[Object], workloads: dict[str, Workload]):
    services = of_kind(objects, "Service")
    addresses: list[str] = []
    for name in STAGES:
        workload, (port,) = workloads[name], services[name]["spec"]["ports"]
        assert settings_of(workload, name).stage.listen == f"0.0.0.0:{workload.listen_port}"
        assert (port["port"], services[name]["spec"]["clusterIP"]) == (workload.listen_port, "None")
        selector = services[name]["spec"]["selector"].items()
        assert [other for other, its in workloads.items() if selector <= its.labels.items()] == [name]
        assert workload.spec["selector"]["matchLabels"].items() == selector
        addresses.append(f"{name}:{port['port']}")
    assert settings_of(workloads["target"], "target").target.stages == tuple(addresses)
    followers = [settings_of(workloads[name], name).stage.next for name in STAGES]
    assert followers == [(address,) for address in addresses[1:]] + [()]


def test_only_the_target_and_the_stages_reach_a_stage(objects: list[Object], workloads: dict[str, Workload]):
    policy = of_kind(objects, "NetworkPolicy")["stages"]["spec"]
    matches = policy["podSelector"]["matchLabels"].items()
    assert {name for name, workload in workloads.items() if matches <= workload.labels.items()} == set(STAGES)
    callers, everybody = policy["ingress"]
    (selector,) = (source["podSelector"] for source in callers["from"])
    allowed = {row["key"]: row["values"] for row in selector["matchExpressions"]}
    reach = {name for name, its in workloads.items() if all(its.labels[key] in allowed[key] for key in allowed)}
    assert reach == {"target", *STAGES}
    assert [port["port"] for port in callers["ports"]] == ["grpc"]
    assert [port["port"] for port in everybody["ports"]] == ["metrics"]


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_runs_as_the_other_workers_do(workloads: dict[str, Workload], name: str):
    stage, target = workloads[name], workloads["target"]
    settings = settings_of(stage, name).stage
    assert stage.container["args"] == ["stage"]
    assert str(settings.threads) == stage.container["resources"]["limits"]["cpu"]
    assert settings.metrics == f"0.0.0.0:{stage.metrics_port}"
    assert stage.pod["securityContext"] == target.pod["securityContext"]
    assert stage.container["securityContext"] == target.container["securityContext"]
    assert stage.container["image"] == target.container["image"]
    assert stage.pod["terminationGracePeriodSeconds"] >= 5 + settings.drain + 5
    for kind in ("startup", "readiness", "liveness"):
        probe, model = stage.container[f"{kind}Probe"], target.container[f"{kind}Probe"]
        assert probe == {**model, "grpc": {**model["grpc"], "port": stage.listen_port}}


def test_the_target_waits_for_its_stages_as_long_as_they_may_load(workloads: dict[str, Workload]):
    probe = workloads["stage-0"].container["startupProbe"]
    window_s = probe["periodSeconds"] * probe["failureThreshold"]
    assert settings_of(workloads["target"], "target").target.retry >= window_s


def test_certificates_reach_the_stages_too():
    secure = workloads_of(kustomize(BASE.parent / "stages-mtls"))
    for name in STAGES:
        settings = settings_of(secure[name], name).stage
        (mount,) = (m for m in secure[name].container["volumeMounts"] if m["name"] == "tls")
        files = [settings.tls_cert, settings.tls_key, settings.tls_ca]
        assert files == [f"{mount['mountPath']}/{file}" for file in ("tls.crt", "tls.key", "ca.crt")]
        assert settings.insecure is False
        probes = {
            secure[name].container[f"{kind}Probe"]["grpc"]["port"] for kind in ("startup", "readiness", "liveness")
        }
        assert settings.health == f"0.0.0.0:{probes.pop()}"
        assert not probes
    assert settings_of(secure["target"], "target").target.insecure is False
