"""The chart, rendered by Helm with the values in ``helm/hps/ci``."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.peers.environments import KUBERNETES_SCHEMAS, PeerMissing
from benchmarks.peers.go_tools import HELM, KUBECONFORM, GoTool
from benchmarks.peers.kube_crds import KUBE_CRDS, KubeCrds

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm/hps"
MATRIX = ("minimal", "gpu", "ha", "external", "everything", "off")
RELEASE, NAMESPACE = "hps", "ranking"

Object = dict[str, Any]


def need(*tools: GoTool | KubeCrds) -> None:
    """Skips where a tool was not built; in continuous integration that is an error."""
    missing = [tool.name for tool in tools if not tool.ready()]
    if missing:
        reason = f"{', '.join(missing)} missing: run `make check-deploy`"
        if os.environ.get("CI"):
            raise PeerMissing(reason)
        pytest.skip(reason)


def values_file(name: str) -> Path:
    return CHART / f"ci/{name}-values.yaml"


def helm(*words: str | Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    need(HELM)
    return subprocess.run(
        [str(HELM.program), *map(str, words)],
        env={**os.environ, "HELM_NAMESPACE": NAMESPACE, **(env or {})},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def helm_template(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return helm("template", RELEASE, CHART, *words)


@cache
def rendered_text(name: str) -> str:
    """All that the chart renders with the values of that name."""
    done = helm_template("--values", values_file(name))
    assert done.returncode == 0, done.stderr
    return done.stdout


def documented() -> list[str]:
    """The values that docs/kubernetes.md shows."""
    page = (ROOT / "docs/kubernetes.md").read_text()
    blocks = re.findall(r"```yaml\n(# my-values|[a-z]+:)(.*?)```", page, re.DOTALL)
    return ["".join(block) for block in blocks]


def objects(text: str) -> list[Object]:
    return [each for each in yaml.load_all(text, yaml.CSafeLoader) if each]


@cache
def _by_name(name: str) -> dict[tuple[str, str], Object]:
    found: dict[tuple[str, str], Object] = {}
    for each in objects(rendered_text(name)):
        key = each["kind"], each["metadata"]["name"]
        assert key not in found, f"{name} renders two of {key}"
        found[key] = each
    return found


class Rendered:
    """The objects of one rendering, by kind and name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.all = _by_name(name)

    def __getitem__(self, key: tuple[str, str]) -> Object:
        return self.all[key]

    def of(self, *kinds: str) -> list[Object]:
        return [each for (kind, _), each in self.all.items() if kind in kinds]

    def names(self, kind: str) -> set[str]:
        return {name for k, name in self.all if k == kind}

    @property
    def prefix(self) -> str:
        (name,) = [n.removesuffix("-lookup") for n in self.names("StatefulSet")]
        return name

    def servers(self) -> dict[str, Object]:
        """Our workloads by role."""
        return {
            each["metadata"]["labels"]["app.kubernetes.io/component"]: each
            for each in self.of("StatefulSet", "Deployment")
            if "hps.metrics" in each["spec"]["template"]["metadata"]["labels"]
        }

    def config(self) -> Any:
        text = self["ConfigMap", self.prefix]["data"]["config.yaml"]
        return yaml.safe_load(text)


def pod(workload: Object) -> Object:
    """A workload's pod."""
    found: Object = workload["spec"]["template"]["spec"]
    return found


def pods(rendered: Rendered) -> Iterable[tuple[str, Object]]:
    """Every pod that a rendering leads to, with its workload's name."""
    for each in rendered.of("StatefulSet", "Deployment"):
        yield each["metadata"]["name"], pod(each)
    for each in rendered.of("CronJob"):
        yield each["metadata"]["name"], each["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    for each in rendered.of("Pod"):
        yield each["metadata"]["name"], each["spec"]


def main_container(workload: Object) -> Object:
    found: Object = pod(workload)["containers"][0]
    return found


def kubeconform(version: str, text: str, crds: Path) -> subprocess.CompletedProcess[str]:
    """Checks objects against the schemas of a Kubernetes version, and of the CRDs in ``crds``."""
    need(KUBECONFORM)
    if not KUBERNETES_SCHEMAS.ready():
        reason = "Kubernetes' schemas are missing: run `make check-deploy`"
        if os.environ.get("CI"):
            raise PeerMissing(reason)
        pytest.skip(reason)
    schemas = KUBERNETES_SCHEMAS.folder / "schemas"
    at, kind = "{{.NormalizedKubernetesVersion}}", "{{.ResourceKind}}"
    return subprocess.run(
        [
            # One at a time, so that a kind's schema is read once.
            str(KUBECONFORM.program), "-n", "1", "-strict", "-summary",
            "-kubernetes-version", version,
            "-schema-location", f"{schemas}/{at}/{kind}{{{{.KindSuffix}}}}.json",
            "-schema-location", f"{crds}/{kind}.json",
        ],
        env={**os.environ, "GOGC": "400"},
        input=text, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def crds() -> Iterable[Any]:
    """The CustomResourceDefinitions of the operators that the chart has objects for."""
    need(KUBE_CRDS)
    for file in sorted(KUBE_CRDS.folder.glob("*.yaml")):
        yield yaml.load(file.read_text(), yaml.CSafeLoader)


def stored_version(crd: Any) -> Any:
    (version,) = [each for each in crd["spec"]["versions"] if each["storage"]]
    return version


def strict(schema: Any) -> Any:
    """A CRD's schema as one that refuses unknown fields."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(value) for key, value in schema.items()}
    open_ended = schema.get("x-kubernetes-preserve-unknown-fields")
    if isinstance(schema.get("properties"), dict) and not open_ended:
        # Metadata is Kubernetes' own.
        made.setdefault("additionalProperties", False)
    return made


def crd_schemas(folder: Path) -> Path:
    """The CRDs' schemas as kubeconform reads them."""
    for crd in crds():
        schema = strict(stored_version(crd)["schema"]["openAPIV3Schema"])
        (folder / f"{crd['spec']['names']['singular']}.json").write_text(json.dumps(schema))
    return folder
