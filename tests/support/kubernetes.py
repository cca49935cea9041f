"""The Kubernetes base as kustomize renders it: its objects, and its workloads with what their containers see."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from specsplit.core.defaults import ENV_PREFIX
from specsplit.core.settings import Settings, load_settings

ROOT = Path(__file__).resolve().parents[2]
BASE = ROOT / "k8s" / "base"
ROLES = {"target": "target", "draft": "draft", "gateway": "gateway", "orchestrate": "generate"}
"""Each workload, and the purpose for which its process reads the settings."""
WORKERS = ("target", "draft")
STAGES = {"stage-0": "stage", "stage-1": "stage"}
"""As ROLES, for what k8s/stages adds; in the order of their layers."""
Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Workload:
    """A Deployment or Job with its one container."""

    spec: Object
    labels: dict[str, str]
    pod: Object
    environment: dict[str, str]
    """As the container sees it: ConfigMaps, values, and limits of its resources."""

    @property
    def container(self) -> Object:
        (container,) = self.pod["containers"]
        return container

    @property
    def listen_port(self) -> int:
        return self._port(0)

    @property
    def metrics_port(self) -> int:
        return self._port(1)

    def _port(self, index: int) -> int:
        return self.container["ports"][index]["containerPort"]


def kustomize(folder: Path) -> list[Object]:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed, and only it renders the Kubernetes base")
    rendered = subprocess.run(
        ["kubectl", "kustomize", str(folder)], capture_output=True, text=True, timeout=60, check=False
    )
    assert rendered.returncode == 0, rendered.stderr
    assert rendered.stderr == "", "kustomize warns"
    return [item for item in yaml.safe_load_all(rendered.stdout) if item]


def of_kind(objects: list[Object], kind: str) -> dict[str, Object]:
    return {item["metadata"]["name"]: item for item in objects if item["kind"] == kind}


def environment_of(container: Object, config_maps: Mapping[str, Object]) -> dict[str, str]:
    found: dict[str, str] = {}
    for source in container.get("envFrom", []):
        found.update(config_maps[source["configMapRef"]["name"]]["data"])
    for variable in container.get("env", []):
        if "value" in variable:
            found[variable["name"]] = variable["value"]
        else:
            kind, resource = variable["valueFrom"]["resourceFieldRef"]["resource"].split(".")
            quantity = container["resources"][kind][resource]
            assert resource == "cpu"
            cores = float(quantity[:-1]) / 1000 if quantity.endswith("m") else float(quantity)
            found[variable["name"]] = str(math.ceil(cores))
    return found


def workloads_of(objects: list[Object]) -> dict[str, Workload]:
    config_maps = of_kind(objects, "ConfigMap")
    found: dict[str, Workload] = {}
    for name, item in {**of_kind(objects, "Deployment"), **of_kind(objects, "Job")}.items():
        template = item["spec"]["template"]
        pod = template["spec"]
        environment = environment_of(pod["containers"][0], config_maps)
        found[name] = Workload(item["spec"], template["metadata"]["labels"], pod, environment)
    return found


def settings_of(workload: Workload, name: str) -> Settings:
    """Return the settings that the container's process would run with."""
    with pytest.MonkeyPatch.context() as patch:
        for variable in [variable for variable in os.environ if variable.startswith(ENV_PREFIX)]:
            patch.delenv(variable)
        for variable, value in workload.environment.items():
            if variable.startswith(ENV_PREFIX):
                patch.setenv(variable, value)
        effective = load_settings(purpose={**ROLES, **STAGES}[name])  # pyright: ignore[reportArgumentType]
    ours = {variable for variable in workload.environment if variable.startswith(ENV_PREFIX)}
    assert {origin.name for origin in effective.origins.values()} == ours
    return effective.settings
