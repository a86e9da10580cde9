"""The chart's whole life on a real Kubernetes API server: installed, upgraded, rolled back, removed."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.deploy.charts import CHART, MATRIX, NAMESPACE, RELEASE, Rendered, helm, values_file
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
    # Objects of one's own have the labels that one gives them.
    own = {key for key in rendered.all if key[1].endswith(("-more", "-text"))}
    values = ("--values", str(values_file(name)))
    printed = done(kube, "install", RELEASE, str(CHART), *values)
    assert "rollout status statefulset" in printed
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


def test_helm_test_shows_what_the_test_found(kube: Cluster) -> None:
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


def test_a_scaler_s_release_begins_with_one_pod(kube: Cluster) -> None:
    """As docs/kubernetes.md says of switching one on."""
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


def replicas(kube: Cluster) -> int:
    (nodes,) = objects_of(kube, "StatefulSet").values()
    return int(nodes["spec"]["replicas"])


def template(workload: Any) -> Any:
    return workload["spec"]["template"]


def remove(kube: Cluster, path: str) -> None:
    status, answer = kube.ask(path, verb="DELETE")
    assert status == 200, answer


def test_the_server_itself_takes_every_object(kube: Cluster) -> None:
    """Dry, so that nothing is left: defaults, conversions and admission included."""
    values = ("--values", str(values_file("everything")))
    done(kube, "install", RELEASE, str(CHART), *values, "--dry-run=server")
    assert everything(kube) == set()
