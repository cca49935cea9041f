"""The Kubernetes base as kustomize renders it: valid, restricted, its settings real, names and ports in agreement."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import grpc
import pytest
import typer
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kubernetes_validate import utils as schemas

import specsplit
from specsplit.cli import options
from specsplit.cli.commands import app
from specsplit.core.defaults import DEFAULT_CONTEXT, DEFAULT_NODE_LIMIT, ENV_PREFIX
from specsplit.core.errors import UsageError
from specsplit.core.settings import KEYS
from specsplit.model.attention.paths import slot_rows
from specsplit.rpc.server import serving
from tests.support.kubernetes import (
    BASE,
    ROLES,
    ROOT,
    WORKERS,
    Object,
    Workload,
    kustomize,
    of_kind,
    settings_of,
    workloads_of,
)

CONTAINERFILE = ROOT / "Containerfile"
OLDEST = (1, 30)
"""What docs/deployment.md asks of the cluster."""
VERSIONS = sorted({v for v in schemas.all_versions() if tuple(map(int, v.split(".")[:2])) >= OLDEST})
QWEN3 = {"target": (8_190_735_360, 147_456), "draft": (596_049_920, 114_688)}
"""Parameters of Qwen3-8B and Qwen3-0.6B, and the bytes of a token's keys and values in bf16."""
COMMANDS = {"gateway": "serve"}
"""The command of a workload that has another name."""


@pytest.fixture(scope="module")
def objects() -> list[Object]:
    return kustomize(BASE)


@pytest.fixture(scope="module")
def workloads(objects: list[Object]) -> dict[str, Workload]:
    return workloads_of(objects)


@pytest.fixture(scope="module")
def services(objects: list[Object]) -> dict[str, Object]:
    return of_kind(objects, "Service")


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid(objects: list[Object], version: str):
    for item in objects:
        schemas.validate(item, version, strict=True)


def test_the_validator_knows_recent_versions_and_refuses_an_unknown_field(objects: list[Object]):
    assert len(VERSIONS) >= 5
    broken = {**objects[0], "spce": {}}
    with pytest.raises(schemas.ValidationError):
        schemas.validate(broken, VERSIONS[-1], strict=True)


def test_the_base_is_workers_and_a_gateway_with_services_and_one_job(objects: list[Object]):
    kinds = ("Deployment", "Service", "Job", "NetworkPolicy", "PodDisruptionBudget")
    assert {kind: set(of_kind(objects, kind)) for kind in kinds} == {
        "Deployment": {"draft", "target", "gateway"},
        "Service": {"draft", "target", "gateway"},
        "Job": {"orchestrate"},
        "NetworkPolicy": {"workers", "gateway"},
        "PodDisruptionBudget": {"gateway"},
    }
    assert len(objects) == 10 + len(of_kind(objects, "ConfigMap"))
    assert all("namespace" not in item["metadata"] for item in objects), "the namespace is the user's"


def test_every_variable_of_ours_is_a_setting_that_accepts_its_value(workloads: dict[str, Workload]):
    known = {f"{ENV_PREFIX}{key.replace('.', '_').upper()}" for key in KEYS}
    for name, workload in workloads.items():
        ours = {variable for variable in workload.environment if variable.startswith(ENV_PREFIX)}
        assert ours
        assert ours <= known
        assert settings_of(workload, name)


def test_no_config_map_is_left_unused(objects: list[Object]):
    used = {
        source["configMapRef"]["name"]
        for kind in ("Deployment", "Job")
        for item in of_kind(objects, kind).values()
        for source in item["spec"]["template"]["spec"]["containers"][0]["envFrom"]
    }
    assert used == set(of_kind(objects, "ConfigMap"))


@pytest.mark.parametrize("name", ROLES)
def test_the_arguments_are_a_command_of_the_command_line(workloads: dict[str, Workload], name: str):
    commands: Any = typer.main.get_command(app)
    command, *rest = workloads[name].container["args"]
    assert command == COMMANDS.get(name, name)
    assert command in commands.commands
    context = commands.commands[command].make_context(command, rest)  # raises for an option that does not exist
    given = options.given(context)
    assert "command" not in workloads[name].container, "the image's entry point is the command"
    if name == "orchestrate":
        assert given["json"] is True
        assert given["prompt"].strip()


@pytest.mark.parametrize("name", WORKERS)
def test_a_worker_runs_as_many_threads_as_it_may_use_cores(workloads: dict[str, Workload], name: str):
    settings = settings_of(workloads[name], name)
    threads = getattr(settings, name).threads
    assert str(threads) == workloads[name].container["resources"]["limits"]["cpu"]


@pytest.mark.parametrize("name", WORKERS)
def test_ports_agree_from_the_listening_socket_to_the_service(
    workloads: dict[str, Workload], services: dict[str, Object], name: str
):
    workload, service = workloads[name], services[name]["spec"]
    host, _, port = getattr(settings_of(workload, name), name).listen.rpartition(":")
    (service_port,) = service["ports"]
    assert host == "0.0.0.0", "a pod is reached at its own address, never at loopback"
    assert int(port) == workload.listen_port
    assert service["clusterIP"] == "None"
    assert service_port["port"] == workload.listen_port, "a headless Service maps no port"
    assert service_port["targetPort"] == workload.container["ports"][0]["name"]


@pytest.mark.parametrize("name", [*WORKERS, "gateway"])
def test_prometheus_finds_the_metrics_of_a_service(workloads: dict[str, Workload], name: str):
    workload = workloads[name]
    assert workload.container["ports"][1]["name"] == "metrics"
    assert getattr(settings_of(workload, name), name).metrics == f"0.0.0.0:{workload.metrics_port}"
    annotations = workload.spec["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/scrape"] == "true"
    assert int(annotations["prometheus.io/port"]) == workload.metrics_port
    assert annotations["prometheus.io/path"] == "/metrics"
    assert workload.metrics_port != workload.listen_port


def test_a_service_selects_the_pods_of_its_own_role_only(workloads: dict[str, Workload], services: dict[str, Object]):
    for role, service in services.items():
        selector = service["spec"]["selector"].items()
        assert [name for name, workload in workloads.items() if selector <= workload.labels.items()] == [role]
        assert workloads[role].spec["selector"]["matchLabels"].items() == selector


def test_the_job_asks_the_services(workloads: dict[str, Workload]):
    settings = settings_of(workloads["orchestrate"], "orchestrate")
    assert settings.is_remote
    for role in WORKERS:
        assert getattr(settings, role).address == f"{role}:{workloads[role].listen_port}"


def test_no_service_makes_variables_that_look_like_settings(services: dict[str, Object]):
    for name in services:
        assert not f"{name.upper().replace('-', '_')}_SERVICE_HOST".startswith(ENV_PREFIX)


@pytest.mark.parametrize("name", WORKERS)
def test_probes_ask_the_worker_itself_and_nothing_else(workloads: dict[str, Workload], name: str):
    """So the outage of a draft leaves everything but the draft ready."""
    container = workloads[name].container
    probes = {kind: container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")}
    asked = {kind: probe["grpc"] for kind, probe in probes.items()}
    port = workloads[name].listen_port
    assert asked == {
        "startup": {"port": port, "service": "readiness"},
        "readiness": {"port": port, "service": "readiness"},
        "liveness": {"port": port, "service": "liveness"},
    }
    assert all({"exec", "httpGet", "tcpSocket"}.isdisjoint(probe) for probe in probes.values())
    assert probes["startup"]["periodSeconds"] * probes["startup"]["failureThreshold"] >= 600, "a model has to load"


async def test_what_the_probes_ask_for_is_served(workloads: dict[str, Workload]):
    asked = {
        probe["grpc"]["service"]
        for name in WORKERS
        for kind, probe in workloads[name].container.items()
        if kind.endswith("Probe")
    }
    async with serving("127.0.0.1:0", []) as server, grpc.aio.insecure_channel(server.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in asked:
            answer = await health.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING, service


def test_links_are_plaintext_only_where_the_base_spells_it_out(workloads: dict[str, Workload]):
    secure = workloads_of(kustomize(BASE.parent / "mtls"))
    roles = {"target": "target", "draft": "draft", "gateway": "gateway", "orchestrate": "orchestrator"}
    for name, role in roles.items():
        assert getattr(settings_of(workloads[name], name), role).insecure is True
        workload, settings = secure[name], getattr(settings_of(secure[name], name), role)
        (mount,) = (m for m in workload.container["volumeMounts"] if m["name"] == "tls")
        (volume,) = (v for v in workload.pod["volumes"] if v["name"] == "tls")
        assert volume["secret"] == {"secretName": f"{role}-tls", "defaultMode": 0o440}
        files = [settings.tls_cert, settings.tls_key, settings.tls_ca]
        assert files == [f"{mount['mountPath']}/{file}" for file in ("tls.crt", "tls.key", "ca.crt")]
        assert (settings.insecure, mount["readOnly"]) == (False, True)
        if name in WORKERS:
            port = int(settings.health.rpartition(":")[2])
            probes = [
                workload.container[f"{kind}Probe"]["grpc"]["port"] for kind in ("startup", "readiness", "liveness")
            ]
            assert probes == [port] * 3
            assert port != workload.listen_port


def test_the_job_tries_as_long_as_a_model_may_take_to_load(workloads: dict[str, Workload]):
    startup = workloads["target"].container["startupProbe"]
    waits_s = sum(min(10 * 2**attempt, 360) for attempt in range(workloads["orchestrate"].spec["backoffLimit"]))
    window_s = startup["periodSeconds"] * startup["failureThreshold"]
    assert window_s <= waits_s <= workloads["orchestrate"].spec["activeDeadlineSeconds"]


def test_the_job_gives_up_at_once_on_wrong_usage(workloads: dict[str, Workload]):
    job = workloads["orchestrate"]
    rule = next(rule for rule in job.spec["podFailurePolicy"]["rules"] if rule["action"] == "FailJob")
    assert rule["onExitCodes"]["containerName"] == job.container["name"]
    assert rule["onExitCodes"]["values"] == [UsageError.exit_code]
    assert job.pod["restartPolicy"] == "Never"


@pytest.mark.parametrize("name", [*WORKERS, "gateway"])
def test_a_worker_has_time_to_drain_before_it_is_killed(workloads: dict[str, Workload], name: str):
    pause = workloads[name].container["lifecycle"]["preStop"]
    assert set(pause) == {"sleep"}, "needs no shell in the image"
    drain_s = getattr(settings_of(workloads[name], name), name).drain
    assert workloads[name].pod["terminationGracePeriodSeconds"] >= pause["sleep"]["seconds"] + drain_s + 5


@pytest.mark.parametrize("name", [*WORKERS, "gateway"])
def test_a_rollout_has_failed_only_when_its_pods_have(workloads: dict[str, Workload], name: str):
    startup = workloads[name].container["startupProbe"]
    window_s = startup["periodSeconds"] * startup["failureThreshold"]
    ending_s = workloads[name].pod["terminationGracePeriodSeconds"]
    assert workloads[name].spec["progressDeadlineSeconds"] > window_s + ending_s


def _containers(workload: Workload) -> Iterator[Object]:
    for kind in ("containers", "initContainers", "ephemeralContainers"):
        yield from workload.pod.get(kind, [])


@pytest.mark.parametrize("name", ROLES)
def test_a_pod_meets_pod_security_restricted(workloads: dict[str, Workload], name: str):
    pod = workloads[name].pod
    assert {"hostNetwork", "hostPID", "hostIPC"}.isdisjoint(pod)
    assert all({"emptyDir", "configMap", "secret"} & volume.keys() for volume in pod["volumes"])
    for container in _containers(workloads[name]):
        context = {**pod["securityContext"], **container["securityContext"]}
        assert context["runAsNonRoot"] is True
        assert context["runAsUser"] > 0
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert context["allowPrivilegeEscalation"] is False
        assert context["readOnlyRootFilesystem"] is True
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert "privileged" not in context
        assert all("hostPort" not in port for port in container.get("ports", []))


@pytest.mark.parametrize("name", ROLES)
def test_a_pod_is_told_nothing_of_the_cluster_and_has_its_share_of_it(workloads: dict[str, Workload], name: str):
    pod = workloads[name].pod
    assert pod["enableServiceLinks"] is False
    assert pod["automountServiceAccountToken"] is False
    for container in _containers(workloads[name]):
        for kind in ("requests", "limits"):
            assert {"cpu", "memory"} <= container["resources"][kind].keys()


@pytest.mark.parametrize("name", ROLES)
def test_whatever_is_written_lands_on_a_volume(workloads: dict[str, Workload], name: str):
    pod, container = workloads[name].pod, workloads[name].container
    emptied = {volume["name"] for volume in pod["volumes"] if "emptyDir" in volume}
    folders = [PurePosixPath(m["mountPath"]) for m in container["volumeMounts"] if m["name"] in emptied]
    assert all("sizeLimit" in volume["emptyDir"] for volume in pod["volumes"] if "emptyDir" in volume)
    written = [workloads[name].environment[variable] for variable in ("HOME", "XDG_CACHE_HOME", "HF_HOME")]
    for path in ["/tmp", *written]:
        assert any(PurePosixPath(path).is_relative_to(folder) for folder in folders), path


def test_labels_are_the_standard_ones_and_templates_carry_them(objects: list[Object]):
    for item in objects:
        labels = item["metadata"]["labels"]
        assert labels["app.kubernetes.io/part-of"] == "specsplit"
        template = item["spec"].get("template") if "spec" in item else None  # a policy has none
        if template is not None:
            assert labels.items() <= template["metadata"]["labels"].items()
            assert "app.kubernetes.io/component" in labels


def test_images_carry_the_version_and_only_workers_need_torch(workloads: dict[str, Workload]):
    images = {name: workload.container["image"] for name, workload in workloads.items()}
    assert images == {
        "target": f"specsplit-worker:{specsplit.__version__}",
        "draft": f"specsplit-worker:{specsplit.__version__}",
        "gateway": f"specsplit-gateway:{specsplit.__version__}",
        "orchestrate": f"specsplit-orchestrator:{specsplit.__version__}",
    }


def _instructions(name: str) -> list[str]:
    text = re.sub(r"^#.*\n", "", CONTAINERFILE.read_text(encoding="utf-8"), flags=re.MULTILINE).replace("\\\n", " ")
    return [line.removeprefix(name).strip() for line in text.splitlines() if line.startswith(f"{name} ")]


def test_the_image_runs_the_command_as_the_user_that_the_pods_name(workloads: dict[str, Workload]):
    context = workloads["target"].pod["securityContext"]
    assert _instructions("USER") == [f"{context['runAsUser']}:{context['runAsGroup']}"]
    assert _instructions("ENTRYPOINT") == ['["specsplit"]']
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "specsplit" in project["scripts"]
    assert {"worker", "gateway"} <= project["optional-dependencies"].keys()
    lowest = project["requires-python"].removeprefix(">=")
    assert {line.split()[0] for line in _instructions("FROM")} == {f"python:{lowest}-slim"}


def test_what_the_image_is_built_from_exists_and_is_not_ignored():
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    ignored, kept = (
        [line for line in lines if not line.startswith(("#", "!"))],
        {line[1:] for line in lines if line[:1] == "!"},
    )
    copied = [name for line in _instructions("COPY") if "--from" not in line for name in line.split()[:-1]]
    assert "*" in ignored
    assert set(copied) == kept
    assert all((ROOT / name).exists() for name in copied)


def test_the_page_on_deployment_builds_and_overlays_what_exists(tmp_path: Path):
    page = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)
    overlay = yaml.safe_load(block)
    assert overlay["resources"] == ["../k8s/base"]
    overlay["resources"] = [os.path.relpath(BASE.resolve(), tmp_path.resolve())]
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(overlay), encoding="utf-8")
    objects = kustomize(tmp_path)
    workloads = workloads_of(objects)
    for item in objects:
        schemas.validate(item, VERSIONS[-1], strict=True)
    assert settings_of(workloads["target"], "target").target.model == "Qwen/Qwen3-8B"
    assert settings_of(workloads["target"], "target").target.threads == 16
    assert settings_of(workloads["draft"], "draft").draft.model == "Qwen/Qwen3-0.6B"
    assert settings_of(workloads["orchestrate"], "orchestrate").target.address == "target:50051"
    for name, (num_parameters, kv_bytes) in QWEN3.items():
        sessions = getattr(settings_of(workloads[name], name), name).sessions
        needed = 2 * num_parameters + sessions * kv_bytes * slot_rows(DEFAULT_CONTEXT + DEFAULT_NODE_LIMIT)
        limit = workloads[name].container["resources"]["limits"]["memory"]
        assert int(limit.removesuffix("Gi")) * 2**30 > 1.25 * needed, "with a margin for the process itself"
    make = ["make", "--dry-run", "images", "BUILDER=buildah", "PIP_CONF=pip.conf"]
    commands = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    built = set(re.findall(r"-t (\S+)", commands))
    (shown,) = re.findall(r"docker (build .*)", page)
    assert f"buildah {shown}\n" in commands
    assert built == {workload.container["image"] for workload in workloads_of(kustomize(BASE)).values()}
    assert {image.split("/")[-1] for image in (w.container["image"] for w in workloads.values())} == built
