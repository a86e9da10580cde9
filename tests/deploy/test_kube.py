"""The chart's whole life on a real Kubernetes API server: installed, upgraded, rolled back, removed."""

from __future__ import annotations

import base64
import json
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.charts import (
    CHART,
    MATRIX,
    NAMESPACE,
    RELEASE,
    Rendered,
    documented,
    helm,
    values_file,
)
from tests.deploy.kube import Cluster, cluster
from tests.deploy.kubelet import PODS, kubelet

pytestmark = pytest.mark.kube

# Where the API has what the chart makes.
PATHS = {
    "/api/v1": ("Service", "ConfigMap", "Secret", "ServiceAccount"),
    "/apis/apps/v1": ("StatefulSet", "Deployment"),
    "/apis/autoscaling/v2": ("HorizontalPodAutoscaler",),
    "/apis/batch/v1": ("CronJob",),
    "/apis/keda.sh/v1alpha1": ("ScaledObject",),
    "/apis/gateway.networking.k8s.io/v1": ("HTTPRoute", "GRPCRoute"),
    "/apis/monitoring.coreos.com/v1": ("ServiceMonitor", "PrometheusRule"),
    "/apis/networking.k8s.io/v1": ("NetworkPolicy", "Ingress"),
    "/apis/policy/v1": ("PodDisruptionBudget",),
}
PATH_OF = {kind: path for path, kinds in PATHS.items() for kind in kinds}


@pytest.fixture(scope="module")
def kube() -> Iterator[Cluster]:
    if not os.environ.get("HPS_KUBE"):
        pytest.skip("run by `make test-kube`")
    with cluster() as found:
        yield found


def done(kube: Cluster, *words: str) -> str:
    result = helm(*words, env={"KUBECONFIG": str(kube.kubeconfig)})
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def plural(kind: str) -> str:
    low = kind.lower()
    return f"{low[:-1]}ies" if low.endswith("y") else f"{low}es" if low.endswith("s") else f"{low}s"


def objects_of(kube: Cluster, kind: str) -> dict[str, Any]:
    """The release's objects of a kind, by name."""
    path = f"{PATH_OF[kind]}/namespaces/{NAMESPACE}/{plural(kind)}"
    status, answer = kube.ask(f"{path}?labelSelector=app.kubernetes.io/instance={RELEASE}")
    assert status == 200, answer
    return {each["metadata"]["name"]: each for each in answer["items"]}


def everything(kube: Cluster) -> set[tuple[str, str]]:
    return {(kind, name) for kind in PATH_OF for name in objects_of(kube, kind)}


@pytest.mark.parametrize("name", MATRIX)
def test_install_upgrade_rollback_uninstall(kube: Cluster, name: str) -> None:
    rendered = Rendered(name)
    hooks = {key for key, each in rendered.all.items() if "helm.sh/hook" in str(each["metadata"])}
    # Objects of the user's values have only the labels given there.
    own = {key for key in rendered.all if key[1].endswith(("-more", "-text"))}
    values = ("--values", str(values_file(name)))
    printed = done(kube, "install", RELEASE, str(CHART), *values)
    assert "rollout status statefulset" in printed
    commands = re.findall("exec .*hps doctor", printed)
    assert len(commands) == len([role for role in rendered.servers() if role != "ingest"])
    assert all(("HPS_API_KEY" in each) == (name != "off") for each in commands)
    installed = everything(kube)
    assert installed == rendered.all.keys() - hooks - own
    (nodes,) = objects_of(kube, "StatefulSet").values()
    keys = {n: s["data"] for n, s in objects_of(kube, "Secret").items() if n.endswith("-keys")}

    done(kube, "upgrade", RELEASE, str(CHART), *values, "--set", "config.server.log_level=debug")
    assert everything(kube) == installed
    (changed,) = objects_of(kube, "StatefulSet").values()
    assert changed["metadata"]["generation"] > nodes["metadata"]["generation"]
    assert template(changed) != template(nodes)
    found = {n: s["data"] for n, s in objects_of(kube, "Secret").items() if n.endswith("-keys")}
    assert found == keys, "keys that callers have stay"

    done(kube, "rollback", RELEASE, "1")
    (back,) = objects_of(kube, "StatefulSet").values()
    assert template(back) == template(nodes)
    found = {n: s["data"] for n, s in objects_of(kube, "Secret").items() if n.endswith("-keys")}
    assert found == keys

    done(kube, "uninstall", RELEASE)
    left = everything(kube)
    assert left == {("Secret", name) for name in keys}
    if keys:
        # Installed again, it takes up the keys that callers have.
        done(kube, "install", RELEASE, str(CHART), *values)
        found = {n: s["data"] for n, s in objects_of(kube, "Secret").items() if n.endswith("-keys")}
        assert found == keys
        done(kube, "uninstall", RELEASE)
    for secret in keys:
        remove(kube, f"/api/v1/namespaces/{NAMESPACE}/secrets/{secret}")


def test_helm_test_prints_its_findings(kube: Cluster) -> None:
    done(kube, "install", RELEASE, str(CHART), "--values", str(values_file("minimal")))
    with kubelet(kube, kube.certificates, "hps is well\n") as machine:
        ending = threading.Thread(target=machine.end_well, args=("hps-test",))
        ending.start()
        printed = done(kube, "test", RELEASE, "--logs", "--timeout", "100s")
        ending.join()
    assert printed.count("hps is well") == 1
    assert "Phase:          Succeeded" in printed
    done(kube, "uninstall", RELEASE)
    remove(kube, f"/api/v1/namespaces/{NAMESPACE}/secrets/hps-keys")
    remove(kube, f"{PODS}/hps-test")


def test_release_with_autoscaler_starts_with_one_pod(kube: Cluster) -> None:
    """Enable the autoscaler as docs/kubernetes.md describes."""
    values = ("--values", str(values_file("minimal")), "--set", "auth.existingSecret=keys")
    scaled = ("--set", "lookup.autoscaling.enabled=true")
    done(kube, "install", RELEASE, str(CHART), *values)
    assert replicas(kube) == 2
    done(kube, "upgrade", RELEASE, str(CHART), *values, *scaled)
    assert replicas(kube) == 1
    path = f"/apis/apps/v1/namespaces/{NAMESPACE}/statefulsets/hps-lookup/scale"
    _, scale = kube.ask(path)
    scale["spec"]["replicas"] = 5
    assert kube.ask(path, scale, verb="PUT")[0] == 200
    done(kube, "upgrade", RELEASE, str(CHART), *values, *scaled, "--set", "drain.seconds=5")
    assert replicas(kube) == 5, "what the scaler chose stays"
    done(kube, "uninstall", RELEASE)


def test_upgrades_keep_changed_api_keys(kube: Cluster) -> None:
    """Upgrades keep them; a rollback restores the chart's Secret (docs/kubernetes.md)."""
    own = f"/api/v1/namespaces/{NAMESPACE}/secrets/mine"
    kube.make(own.removesuffix("/mine"), {"metadata": {"name": "mine"}, "data": {"read-key": ""}})
    for path, given, left in (
        (own.replace("mine", "hps-keys"), (), False),
        (own, ("--set", "auth.existingSecret=mine"), True),
    ):
        values = ("--values", str(values_file("minimal")), *given)
        done(kube, "install", RELEASE, str(CHART), *values)
        first = kube.ask(path)[1]
        changed = {**first["data"], "read-key": base64.b64encode(b"another").decode()}
        assert kube.ask(path, {**first, "data": changed}, verb="PUT")[0] == 200
        done(kube, "upgrade", RELEASE, str(CHART), *values, "--set", "drain.seconds=5")
        assert kube.ask(path)[1]["data"] == changed
        done(kube, "rollback", RELEASE, "1")
        assert kube.ask(path)[1]["data"] == (changed if left else first["data"])
        done(kube, "uninstall", RELEASE)
        remove(kube, path)


def test_rejected_upgrade_changes_nothing(kube: Cluster) -> None:
    values = ("--values", str(values_file("minimal")), "--set", "auth.existingSecret=keys")
    done(kube, "install", RELEASE, str(CHART), *values)
    before = versions(kube)
    for wrong, named in {
        "tls.existingSecret=hps-tls": "tls.enabled=true",
        f"image.digest=sha256:{'a' * 64},lookup.gpu.count=1": "image.gpuDigest",
        "existingConfigMap=mine,networkPolicy.enabled=true": "networkPolicy.stores",
        "lookup.replicas=3": "'replicas'",
    }.items():
        again = ("upgrade", RELEASE, str(CHART), *values, "--set", wrong)
        result = helm(*again, env={"KUBECONFIG": str(kube.kubeconfig)})
        assert result.returncode != 0
        assert named in result.stderr
    assert versions(kube) == before
    assert len(json.loads(done(kube, "history", RELEASE, "--output", "json"))) == 1
    done(kube, "uninstall", RELEASE)


def versions(kube: Cluster) -> dict[tuple[str, str], str]:
    return {
        (kind, name): each["metadata"]["resourceVersion"]
        for kind in PATH_OF
        for name, each in objects_of(kube, kind).items()
    }


def test_existing_configuration_with_gpus_and_policies(kube: Cluster) -> None:
    digest = f"sha256:{'b' * 64}"
    stores = [{"ipBlock": {"cidr": "192.0.2.0/24"}}]
    done(
        kube, "install", RELEASE, str(CHART), "--values", str(values_file("minimal")),
        "--set", "auth.existingSecret=keys,existingConfigMap=mine,networkPolicy.enabled=true",
        "--set", f"lookup.gpu.count=1,image.digest=sha256:{'a' * 64},image.gpuDigest={digest}",
        "--set-json", f"networkPolicy.stores={json.dumps(stores)}",
    )  # fmt: skip
    (nodes,) = objects_of(kube, "StatefulSet").values()
    assert template(nodes)["spec"]["containers"][0]["image"].endswith(digest)
    assert objects_of(kube, "ConfigMap").keys() == set()
    policies = objects_of(kube, "NetworkPolicy")
    assert policies.keys() == {"hps-lookup", "hps-frontend", "hps-jobs"}
    for role in ("lookup", "frontend"):
        assert {"to": stores} in policies[f"hps-{role}"]["spec"]["egress"]
    done(kube, "uninstall", RELEASE)


def test_values_in_docs_install(kube: Cluster, tmp_path: Path) -> None:
    for block in documented():
        file = tmp_path / "values.yaml"
        file.write_text(block)
        models = () if yaml.safe_load(block).get("models") else ("--set", "models.demo=true")
        keys = ("--set", "auth.existingSecret=keys")
        done(kube, "install", RELEASE, str(CHART), "--values", str(file), *models, *keys)
        assert objects_of(kube, "StatefulSet")
        done(kube, "uninstall", RELEASE)


def replicas(kube: Cluster) -> int:
    (nodes,) = objects_of(kube, "StatefulSet").values()
    return int(nodes["spec"]["replicas"])


def template(workload: Any) -> Any:
    return workload["spec"]["template"]


def remove(kube: Cluster, path: str) -> None:
    status, answer = kube.ask(path, verb="DELETE")
    assert status == 200, answer


def test_api_server_accepts_every_object(kube: Cluster) -> None:
    """Dry, so that nothing is left: defaults, conversions and admission included."""
    values = ("--values", str(values_file("everything")))
    done(kube, "install", RELEASE, str(CHART), *values, "--dry-run=server")
    assert everything(kube) == set()
