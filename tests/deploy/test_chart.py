"""The chart without a cluster: what Helm renders, held against Kubernetes' schemas and the server's own."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from hps.cli.options import tls_of
from hps.client import Tls
from hps.config import load_config
from hps.config.auth import check_exposure
from tests.deploy.charts import (
    CHART,
    MATRIX,
    NAMESPACE,
    RELEASE,
    ROOT,
    Rendered,
    crd_schemas,
    documented,
    helm,
    helm_template,
    kubeconform,
    main_container,
    objects,
    pod,
    pods,
    rendered_text,
    values_file,
)
from tests.deploy.network import Network, Peer, peers

# A Secret with keys is another each time.
NO_KEYS = ("--set", "auth.existingSecret=keys")
HEALTHY = {
    "startupProbe": "/v2/health/live",
    "livenessProbe": "/v2/health/live",
    "readinessProbe": "/v2/health/ready",
}


@pytest.fixture(params=MATRIX)
def rendered(request: pytest.FixtureRequest) -> Rendered:
    return Rendered(request.param)


# -- the chart itself ------------------------------------------------------------------------------


def test_readme_and_schema_are_generated_from_the_values() -> None:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import chart_docs
    finally:
        sys.path.pop(0)
    text = (CHART / "values.yaml").read_text()
    remedy = "run `python tools/chart_docs.py`"
    assert (CHART / "README.md").read_text() == chart_docs.readme_text(text), remedy
    assert (CHART / "values.schema.json").read_text() == chart_docs.schema_text(text), remedy
    assert [value.key for value in chart_docs.values(text)[0] if not value.about] == []


def test_chart_version_equals_package_version() -> None:
    import hps

    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == hps.__version__


def test_third_party_images_equal_those_of_compose() -> None:
    chart = yaml.safe_load((CHART / "values.yaml").read_text())
    triton = chart["triton"]["image"]
    named = {f"{triton['repository']}:{triton['tag']}"}
    named |= {chart["dev"][store]["image"] for store in ("redis", "kafka")}
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    found = [re.search(":-(.*)}$", each.get("image", "")) for each in services.values()]
    assert named <= {each[1] for each in found if each}


def test_lint_passes() -> None:
    files = [word for name in MATRIX for word in ("--values", str(values_file(name)))]
    done = helm("lint", "--strict", "--with-subcharts", CHART)
    assert done.returncode == 0, done.stdout + done.stderr
    for name, file in zip(MATRIX, files[1::2], strict=True):
        done = helm("lint", "--strict", CHART, "--values", file)
        assert (done.returncode, "WARNING" in done.stdout) == (0, False), (name, done.stdout)


@pytest.fixture(scope="module")
def crds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return crd_schemas(tmp_path_factory.mktemp("crds"))


@pytest.mark.parametrize("version", [f"1.{minor}.0" for minor in range(29, 35)])
def test_objects_match_the_kubernetes_schemas(version: str, crds: Path) -> None:
    done = kubeconform(version, "\n---\n".join(map(rendered_text, MATRIX)), crds)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " Skipped: 0" in done.stdout
    found = re.search(r"Valid: (\d+)", done.stdout)
    assert found is not None
    assert int(found[1]) == sum(len(Rendered(name).all) for name in MATRIX)


def test_schema_check_rejects_invalid_objects(crds: Path) -> None:
    kinds = [yaml.safe_dump(each) for each in Rendered("ha").of("Deployment", "ServiceMonitor")]
    text = "\n---\n".join(kinds)
    wrong = text.replace("minReadySeconds:", "minReadySecond:").replace("scrapeTime", "scrapTime")
    found = kubeconform("1.34.0", wrong, crds).stdout
    assert "minReadySecond" in found
    assert "scrapTimeout" in found


# -- the configuration -----------------------------------------------------------------------------


def test_rendered_configuration_is_valid(rendered: Rendered, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(rendered["ConfigMap", rendered.prefix]["data"]["config.yaml"])
    settings = load_config(file, environ={}).settings
    check_exposure(settings)
    assert [settings.server.http.port, settings.server.admin.port] == [8000, 8002]
    assert settings.server.grpc is not None
    assert settings.server.grpc.port == 8001
    values = values_of(rendered.name).get("config", {})
    assert held(values, rendered.config()) == values
    split = values_of(rendered.name).get("frontend", {}).get("enabled", True)
    assert bool(settings.lookup.nodes) == split


def values_of(name: str) -> Any:
    return yaml.safe_load(values_file(name).read_text())


def held(values: Any, there: Any) -> Any:
    """The part of ``there`` that ``values`` names."""
    if not isinstance(values, dict):
        return there
    return {key: held(value, there[key]) for key, value in values.items()}


def test_releases_sharing_kafka_have_different_groups(tmp_path: Path) -> None:
    """Readers of one group have a part of the partitions each."""

    def groups(*words: str) -> set[str]:
        done = helm_template("--values", values_file("ha"), *words)
        found = {(e["kind"], e["metadata"]["name"]): e for e in objects(done.stdout)}
        file = tmp_path / "config.yaml"
        file.write_text(found["ConfigMap", "hps"]["data"]["config.yaml"])
        container = main_container(found["StatefulSet", "hps-lookup"])
        given = {e["name"]: e["value"].replace("$(POD_NAME)", "hps-lookup-0")
                 for e in container["env"] if "value" in e}  # fmt: skip
        kafka = load_config(file, environ=given).settings.updates.kafka
        assert kafka is not None
        assert kafka.group is not None
        return {kafka.group, kafka.shared_group}

    assert not groups("--namespace", "production") & groups("--namespace", "staging")
    chosen = "config.updates.kafka.group=mine,config.updates.kafka.shared_group=ours"
    assert groups("--set", chosen) == {"mine", "ours"}
    for role, workload in Rendered("ha").servers().items():
        names = [each["name"] for each in main_container(workload).get("env", [])]
        assert ("HPS__UPDATES__KAFKA__GROUP" in names) == (role == "lookup")


def test_all_paths_of_the_configuration_are_mounted(rendered: Rendered) -> None:
    paths = set(re.findall(r"(?<=['\" ])/(?:etc|var)/[^\s'\"]+", yaml.safe_dump(rendered.config())))
    assert any(path.startswith("/etc") for path in paths) or rendered.name == "off"
    for role, workload in rendered.servers().items():
        own = {
            p for p in paths if role == "lookup" or ("/data" not in p and "/checkpoints" not in p)
        }
        volumes = {volume["name"]: volume for volume in pod(workload)["volumes"]}
        claims = workload["spec"].get("volumeClaimTemplates", [])
        volumes |= {claim["metadata"]["name"]: claim for claim in claims}
        files = set()
        for source in volumes["etc"]["projected"]["sources"]:
            (kind,) = source.values()
            files |= {f"/etc/hps/{item['path']}" for item in kind["items"]}
        assert {path for path in own if path.startswith("/etc")} <= files
        mounts = {m["mountPath"]: m["name"] for m in main_container(workload)["volumeMounts"]}
        assert mounts.keys() >= {"/etc/hps", "/var/lib/hps/models", "/tmp", "/dev/shm"}
        assert set(mounts.values()) <= volumes.keys()
        for path in own - files:
            assert any(path.startswith(mount) for mount in mounts), path


def test_render_rejects_a_setting_given_twice() -> None:
    for setting, value in {
        "server.http.port": "9000",
        "server.drain_s": "5",
        "tiers.rocksdb.path": "/elsewhere",
        "auth.mode": "off",
        "lookup.nodes": "{a:8001}",
    }.items():
        assert f"config.{setting} is set by the chart" in refused(
            "--set", f"config.{setting}={value}"
        )


# -- pods ------------------------------------------------------------------------------------------


def test_pods_are_hardened(rendered: Rendered) -> None:
    for name, spec in pods(rendered):
        assert spec["automountServiceAccountToken"] is False, name
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        own = [
            c
            for c in spec["containers"] + spec.get("initContainers", [])
            if "busybox" not in c["image"]
        ]
        for container in own:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, name
            writable = [m for m in container["volumeMounts"] if not m.get("readOnly")]
            assert writable, "with a read-only root there must be room for temporary files"
            if container["name"] != "models" or rendered.name != "external":
                assert container["resources"]["requests"]
                assert container["resources"]["limits"]["memory"]


def test_probes_use_the_admin_port(rendered: Rendered) -> None:
    scheme = "HTTPS" if values_of(rendered.name).get("tls", {}).get("enabled") else "HTTP"
    for workload in rendered.servers().values():
        container = main_container(workload)
        for probe, path in HEALTHY.items():
            assert container[probe]["httpGet"] == {"path": path, "port": "admin", "scheme": scheme}
        assert {"name": "admin", "containerPort": 8002} in container["ports"]
        if scheme == "HTTPS":
            # Nobody who probes or scrapes has a certificate.
            assert "client_ca_file" not in rendered.config()["server"]["admin"]["tls"]


def test_termination_grace_covers_the_drain(rendered: Rendered) -> None:
    server = rendered.config()["server"]
    for workload in rendered.servers().values():
        spec = pod(workload)
        wait = main_container(workload).get("lifecycle", {}).get("preStop", {}).get("exec", {})
        before = int(wait.get("command", ["sleep", "0"])[1])
        needed = before + server["drain_delay_s"] + server["drain_s"]
        assert spec["terminationGracePeriodSeconds"] >= needed + 5
        # Front ends look at a node twice a second; a balancer hears of a pod that goes within seconds.
        assert server["drain_delay_s"] >= 5


def test_rolling_update_keeps_all_front_ends_available(rendered: Rendered) -> None:
    if (workload := rendered.servers().get("frontend")) is not None:
        assert workload["spec"]["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
        assert workload["spec"]["minReadySeconds"] > 0
    assert rendered.servers()["lookup"]["spec"]["updateStrategy"] == {"type": "RollingUpdate"}


def test_changed_configuration_replaces_pods() -> None:
    def checksum(*words: str) -> str:
        done = helm_template("--values", values_file("minimal"), *words)
        (found,) = {
            each["spec"]["template"]["metadata"]["annotations"]["checksum/config"]
            for each in objects(done.stdout)
            if each["kind"] in ("Deployment", "StatefulSet")
        }
        return str(found)

    before = checksum()
    assert before == checksum("--set", "frontend.replicaCount=5")
    assert before != checksum("--set", "config.server.log_level=debug")


def test_chart_upgrade_alone_replaces_no_pods(tmp_path: Path) -> None:
    shutil.copytree(CHART, tmp_path / "hps")
    file = tmp_path / "hps/Chart.yaml"
    file.write_text(re.sub(r"(?m)^version: .*", "version: 9.0.0", file.read_text()))

    def templates(chart: Path) -> list[Any]:
        done = helm("template", RELEASE, chart, "--values", values_file("minimal"), *NO_KEYS)
        workloads = [each for each in objects(done.stdout) if "template" in each.get("spec", {})]
        assert len(workloads) == 2, done.stderr
        return [each["spec"]["template"] for each in workloads]

    assert templates(tmp_path / "hps") == templates(CHART)


def test_scheduling_values_are_applied_to_pods() -> None:
    rendered = Rendered("everything")
    for name, spec in pods(rendered):
        assert spec["nodeSelector"]["kubernetes.io/arch"] == "amd64", name
        assert spec["tolerations"][0]["key"] == "dedicated", name
    frontend = pod(rendered.servers()["frontend"])
    assert frontend["nodeSelector"]["disk"] == "nvme"
    assert [each["key"] for each in frontend["tolerations"]] == ["dedicated", "spot"]
    for workload in rendered.servers().values():
        zones, hosts = pod(workload)["topologySpreadConstraints"]
        own = workload["spec"]["selector"]["matchLabels"]
        assert zones["labelSelector"]["matchLabels"] == own
        assert hosts["labelSelector"]["matchLabels"] == {"app.kubernetes.io/name": "hps"}


def test_selectors_match_only_pods_of_their_role(rendered: Rendered) -> None:
    labels = {
        role: workload["spec"]["template"]["metadata"]["labels"]
        for role, workload in rendered.servers().items()
    }

    def found(selector: dict[str, str]) -> set[str]:
        return {role for role, given in labels.items() if selector.items() <= given.items()}

    prefix = rendered.prefix
    clients = rendered["Service", prefix]["spec"]
    assert found(clients["selector"]) == {"frontend" if "frontend" in labels else "lookup"}
    assert found(rendered["Service", f"{prefix}-lookup"]["spec"]["selector"]) == {"lookup"}
    assert found(rendered["Service", f"{prefix}-metrics"]["spec"]["selector"]) == set(labels)
    for role, workload in rendered.servers().items():
        assert found(workload["spec"]["selector"]["matchLabels"]) == {role}
    for budget in rendered.of("PodDisruptionBudget"):
        role = budget["metadata"]["labels"]["app.kubernetes.io/component"]
        assert found(budget["spec"]["selector"]["matchLabels"]) == {role}
    for service in rendered.of("Service"):
        ports = {port["targetPort"] for port in service["spec"]["ports"]}
        for role in found(service["spec"]["selector"]):
            # Of containers: before Kubernetes 1.33 no service finds a sidecar's port by name.
            listed = main_container(rendered.servers()[role])["ports"]
            named = {port["name"] for port in listed}
            assert {p for p in ports if isinstance(p, str)} <= named, (
                service["metadata"]["name"],
                role,
            )


def test_roles_reach_each_other_by_service_name(rendered: Rendered) -> None:
    services = {
        f"{name}.{NAMESPACE}.svc.cluster.local" for name in rendered.names("Service")
    }  # fmt: skip
    texts = yaml.safe_dump_all(rendered.of("ConfigMap", "CronJob", "Pod"))
    named = set(re.findall(r"[a-z0-9.-]+\.svc\.cluster\.local", texts))
    named = {re.sub(r"^\S+-lookup-0\.", "", name) for name in named}
    assert named <= services
    assert (f"{rendered.prefix}-lookup.{NAMESPACE}.svc.cluster.local" in named) == (
        "frontend" in rendered.servers()
    )


# -- what the renderings are for -------------------------------------------------------------------


def test_gpu_pods_request_gpus_and_tolerate_their_nodes() -> None:
    rendered = Rendered("gpu")
    for role in ("lookup", "frontend"):
        spec = pod(rendered.servers()[role])
        container = spec["containers"][0]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
        assert container["image"].endswith("-gpu")
        assert spec["runtimeClassName"] == "nvidia"
        assert spec["tolerations"][0]["key"] == "nvidia.com/gpu"
    assert pod(rendered.servers()["lookup"])["nodeSelector"] == {
        "nvidia.com/gpu.product": "NVIDIA-H200"
    }
    assert rendered.config()["tiers"]["gpu"]["capacity_bytes"] == 17179869184
    assert "e+" not in rendered["ConfigMap", "hps"]["data"]["config.yaml"]


def test_image_digests_are_set_per_kind() -> None:
    digests = [f"sha256:{letter * 64}" for letter in "ab"]
    done = helm_template(
        "--values", values_file("minimal"), "--set", f"image.digest={digests[0]}",
        "--set", f"image.gpuDigest={digests[1]},lookup.gpu.count=1",
    )  # fmt: skip
    images = {
        each["metadata"]["name"]: main_container(each)["image"]
        for each in objects(done.stdout)
        if each["kind"] in ("StatefulSet", "Deployment")
    }
    assert images["hps-frontend"].endswith(digests[0])
    assert images["hps-lookup"].endswith(digests[1])


def test_replicas_are_unset_with_an_autoscaler() -> None:
    rendered = Rendered("ha")
    servers = rendered.servers()
    assert servers["lookup"]["spec"]["replicas"] == 3
    assert servers["ingest"]["spec"]["replicas"] == 2
    assert "replicas" not in servers["frontend"]["spec"]
    scaler = rendered["HorizontalPodAutoscaler", "hps-frontend"]["spec"]
    assert scaler["scaleTargetRef"]["name"] in rendered.names("Deployment")
    assert [metric["type"] for metric in scaler["metrics"]] == ["Resource", "Pods"]
    everything = Rendered("everything")
    assert all("replicas" not in w["spec"] for w in everything.servers().values())
    for role in ("frontend", "ingest"):
        scaled = everything["ScaledObject", f"ranking-{role}"]["spec"]
        assert scaled["scaleTargetRef"]["name"] in everything.names("Deployment")
        assert f'pod=~"ranking-{role}-.*"' in scaled["triggers"][0]["metadata"]["query"]


def test_autoscaling_metrics_exist() -> None:
    from hps.observability.metric_table import METRICS

    known = {metric.name for metric in METRICS}
    used = set()
    for name in ("ha", "everything"):
        scalers = Rendered(name).of("HorizontalPodAutoscaler", "ScaledObject")
        used |= set(re.findall(r"hps_\w+", yaml.safe_dump_all(scalers)))
    assert used >= {"hps_running_requests", "hps_queue_requests", "hps_update_lag_messages"}
    assert used <= known


def test_new_nodes_copy_a_checkpoint() -> None:
    rendered = Rendered("ha")
    (first,) = pod(rendered.servers()["lookup"])["initContainers"]
    assert first["args"][:2] == ["store", "restore"]
    folder = rendered.config()["tiers"]["rocksdb"]["checkpoints"]
    assert folder == first["args"][2]
    assert folder in {mount["mountPath"] for mount in first["volumeMounts"]}
    (job,) = rendered.of("CronJob")
    (container,) = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    first_node = f"hps-lookup-0.hps-lookup.{NAMESPACE}.svc.cluster.local"
    assert container["args"][-2:] == ["--server", f"http://{first_node}:8002"]
    key = container["env"][1]["valueFrom"]["secretKeyRef"]
    assert key == {"name": "hps-keys", "key": "admin-key"}


def test_alerts_and_dashboards_equal_their_files() -> None:
    rendered = Rendered("ha")
    (rule,) = rendered.of("PrometheusRule")
    text = (CHART / "files/alerts.yaml").read_text()
    there = "https://git.example.com/hps/docs/runbooks/"
    assert rule["spec"] == yaml.safe_load(text.replace("docs/runbooks/", there))
    open_ended = "metrics.prometheusRule.runbookBase=https://git.example.com/hps/docs/runbooks"
    done = helm_template("--values", values_file("ha"), "--set", open_ended)
    assert rule in objects(done.stdout)
    files = {file.name: file.read_text() for file in (CHART / "files/dashboards").glob("*.json")}
    assert files
    shown = {}
    for each in rendered.of("ConfigMap"):
        if "grafana_dashboard" in each["metadata"]["labels"]:
            shown |= each["data"]
    assert shown == files
    (more,) = Rendered("everything").of("PrometheusRule")
    assert more["spec"]["groups"][:-1] == yaml.safe_load(text)["groups"]


@pytest.mark.parametrize("name", ["ha", "everything"])
def test_service_monitors_set_the_job_that_alerts_use(name: str) -> None:
    rendered = Rendered(name)
    (monitor,) = rendered.of("ServiceMonitor")
    selector = monitor["spec"]["selector"]["matchLabels"].items()
    service, *others = [
        s for s in rendered.of("Service") if selector <= s["metadata"]["labels"].items()
    ]
    assert service["metadata"]["name"] == f"{rendered.prefix}-metrics"
    (rule,) = rendered.of("PrometheusRule")
    (down,) = [
        each["expr"]
        for group in rule["spec"]["groups"]
        for each in group["rules"]
        if each.get("alert") == "HpsDown"
    ]
    pattern = re.search('job=~"([^"]+)"', down)
    assert pattern is not None
    job = service["metadata"]["labels"][monitor["spec"]["jobLabel"]]
    assert re.fullmatch(pattern[1], job), f"HpsDown never fires for job {job}"
    endpoints = monitor["spec"]["endpoints"]
    assert [each["port"] for each in endpoints] == [
        port["name"] for each in (service, *others) for port in each["spec"]["ports"]
    ]
    assert len(others) == (name == "everything")
    for each, endpoint in zip(others, endpoints[1:], strict=True):
        job = each["metadata"]["labels"][monitor["spec"]["jobLabel"]]
        assert job == "triton"
        assert not re.fullmatch(pattern[1], job)
        assert each["spec"]["selector"]["app.kubernetes.io/component"] == "frontend"
        assert "tlsConfig" not in endpoint  # its own port has no certificates


def test_relabelings_may_be_empty() -> None:
    values = ("--values", values_file("everything"))
    done = helm_template(*values, "--set", "metrics.serviceMonitor.relabelings=null")
    assert done.returncode == 0, done.stderr


def test_triton_sidecar_stops_after_the_server() -> None:
    rendered = Rendered("everything")
    triton = pod(rendered.servers()["frontend"])["initContainers"][-1]
    assert (triton["name"], triton["restartPolicy"]) == ("triton", "Always")
    assert "--allow-client-shm=true" in triton["args"]
    assert rendered.config()["dense"]["triton"]["url"] == "localhost:9001"
    assert "triton" not in [c["name"] for c in pod(rendered.servers()["lookup"])["initContainers"]]
    # It requires no key, so no other pod may reach it.
    assert {"--http-address=127.0.0.1", "--grpc-address=127.0.0.1"} <= set(triton["args"])
    assert [port["name"] for port in triton["ports"]] == ["triton-metrics"]
    assert Rendered("external").config()["dense"]["triton"]["url"] == "triton.example.com:8001"


def test_secrets_are_mounted_as_files() -> None:
    rendered = Rendered("external")
    config = rendered.config()
    assert config["tiers"]["redis"]["password_file"] == "/etc/hps/redis/password"
    kafka = config["updates"]["kafka"]
    assert kafka["options_files"] == {"sasl.password": "/etc/hps/kafka/password"}
    assert kafka["options"]["sasl.username"] == "hps"
    assert kafka["options"]["ssl.key.location"] == "/etc/hps/kafka/tls.key"
    assert config["auth"] == {"mode": "api_key", "keys_file": "/etc/hps/auth/keys.yaml"}
    assert config["lookup"]["api_key_file"] == "/etc/hps/auth/read-key"
    assert kafka["shared_writer"] == "ingest"
    assert rendered.of("Secret") == []
    for name in MATRIX:
        for _, spec in pods(Rendered(name)):
            for container in spec["containers"]:
                given = {e["name"]: e for e in container.get("env", [])}
                assert "value" not in given.get("HPS_API_KEY", {})


@pytest.mark.parametrize("name", ["external", "everything", "minimal"])
def test_tools_in_a_pod_use_its_certificates(name: str) -> None:
    rendered = Rendered(name)
    tls = rendered.config()["server"]["http"].get("tls")
    for workload in rendered.servers().values():
        env = {each["name"]: each.get("value", "") for each in main_container(workload)["env"]}
        assert ("HPS_TLS" in env) == (tls is not None)
        if tls is not None:
            given = tls_of(env["HPS_TLS"])
            shown = (tls["certificate_file"], tls["key_file"])
            own = shown if "client_ca_file" in tls else (None, None)
            assert given == Tls("/etc/hps/tls/ca.crt", *own)


def test_tools_may_use_other_certificates() -> None:
    values = ("--values", values_file("external"))
    own = "extraEnv[0].name=HPS_TLS,extraEnv[0].value=ca=/other/ca.crt"
    done = helm_template(*values, "--set", own.replace("ca=/", "ca\\=/"))
    assert done.returncode == 0, done.stderr
    for each in objects(done.stdout):
        if each["kind"] in ("StatefulSet", "Deployment"):
            env = [e for e in main_container(each)["env"] if e["name"] == "HPS_TLS"]
            assert env == [{"name": "HPS_TLS", "value": "ca=/other/ca.crt"}]


def test_api_keys_are_generated_by_default() -> None:
    (secret,) = Rendered("minimal").of("Secret")
    data = secret["stringData"]
    keys = yaml.safe_load(data["keys.yaml"])
    assert [each["key"] for each in keys] == [
        data["read-key"],
        data["write-key"],
        data["admin-key"],
    ]
    assert [each["role"] for each in keys] == ["read", "write", "admin"]
    assert all(len(each["key"]) == 40 for each in keys)
    assert secret["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


def test_ingress_policies_allow_only_required_peers() -> None:
    rendered = Rendered("external")
    network, pods = Network(rendered), peers(rendered)
    client, stranger = Peer(), Peer(namespace="elsewhere")
    prometheus = Peer(namespace="monitoring")
    lookup, frontend, ingest = (pods[role] for role in ("lookup", "frontend", "ingest"))
    store, foreign = Peer(address="192.0.2.7"), Peer(address="203.0.113.7")
    assert network.lets(client, frontend, 8000)
    assert network.lets(client, frontend, 8001)
    assert network.lets(frontend, lookup, 8001)
    assert network.lets(pods["test"], frontend, 8000)
    assert network.lets(pods["test"], lookup, 8002)
    assert not network.lets(client, lookup, 8001)
    assert not network.lets(client, frontend, 8002)
    assert not network.lets(stranger, frontend, 8000)
    for server in (lookup, frontend, ingest):
        assert network.lets(prometheus, server, 8002)
        assert not network.lets(prometheus, server, 8001)
        assert not network.lets(stranger, server, 8002)
        assert network.lets(server, store, 6380)
        assert not network.lets(server, foreign, 6380)
        assert network.lets(server, Peer(namespace="kube-system"), 53, "UDP")
    assert not network.lets(pods["test"], store, 6380)


def test_egress_policies_allow_what_the_role_uses() -> None:
    rendered = Rendered("ha")
    network, pods = Network(rendered), peers(rendered)
    outside = Peer(address="203.0.113.7")
    for role, ports in {"lookup": {6379, 9092}, "ingest": {6379, 9092}, "frontend": set()}.items():
        allowed = {
            port for port in (22, 443, 6379, 8001, 9092) if network.lets(pods[role], outside, port)
        }
        assert allowed == ports, role
    assert network.lets(pods["checkpoints"], pods["lookup"], 8002)
    assert not network.lets(pods["checkpoints"], outside, 443)
    # Only its front end may send requests to a Triton sidecar; scrapers may read its metrics.
    with_triton = Rendered("everything")
    network, pods = Network(with_triton), peers(with_triton)
    assert not network.lets(pods["lookup"], pods["frontend"], 9000)
    assert network.lets(Peer(namespace="monitoring"), pods["frontend"], 9002)
    assert not network.lets(Peer(namespace="monitoring"), pods["lookup"], 9002)
    assert network.lets(pods["lookup"], pods["redis"], 6379)
    assert network.lets(pods["ingest"], pods["kafka"], 9092)
    assert network.lets(pods["frontend"], Peer(namespace="openshift-dns"), 5353, "UDP")


def test_egress_allows_ports_of_configured_stores() -> None:
    done = helm_template(
        "--values", values_file("minimal"), "--set", "networkPolicy.enabled=true",
        "--set", "config.tiers.redis.addresses={redis:7000},config.updates.kafka.brokers=kafka:7001",
        "--set", "config.dense.triton.url=triton:7002",
    )  # fmt: skip
    policies = {
        each["metadata"]["name"]: each["spec"]
        for each in objects(done.stdout)
        if each["kind"] == "NetworkPolicy"
    }
    assert {"ports": [{"port": 7000}, {"port": 7001}]} in policies["hps-lookup"]["egress"]
    assert {"ports": [{"port": 7002}]} in policies["hps-frontend"]["egress"]


def test_egress_allows_stores_of_an_existing_configuration() -> None:
    stores = [{"ipBlock": {"cidr": "192.0.2.0/24"}}]
    done = helm_template(
        "--values", values_file("minimal"), "--set", "existingConfigMap=mine",
        "--set", "networkPolicy.enabled=true,networkPolicy.stores[0].ipBlock.cidr=192.0.2.0/24",
    )  # fmt: skip
    policies = {
        each["metadata"]["name"]: each["spec"]
        for each in objects(done.stdout)
        if each["kind"] == "NetworkPolicy"
    }
    for role in ("lookup", "frontend"):
        assert {"to": stores} in policies[f"hps-{role}"]["egress"]


def test_gateway_routes() -> None:
    rendered = Rendered("everything")
    routes = {kind: rendered[kind, "ranking"]["spec"] for kind in ("HTTPRoute", "GRPCRoute")}
    service = rendered["Service", "ranking"]["spec"]
    ports = {port["name"]: port["port"] for port in service["ports"]}
    for kind, port in {"HTTPRoute": "http", "GRPCRoute": "grpc"}.items():
        ((backend,),) = [rule["backendRefs"] for rule in routes[kind]["rules"]]
        assert backend == {"name": "ranking", "port": ports[port]}
    # A Gateway takes one kind of route for a name.
    assert not set(routes["HTTPRoute"]["hostnames"]) & set(routes["GRPCRoute"]["hostnames"])


def test_test_pod_is_kept_for_its_logs(rendered: Rendered) -> None:
    """Helm reads them when all is done, of every object of the test by its name."""
    hooks = [each for each in rendered.all.values() if "helm.sh/hook" in str(each["metadata"])]
    assert [each["kind"] for each in hooks] == (["Pod"] if rendered.name != "off" else [])
    for each in hooks:
        policy = each["metadata"]["annotations"]["helm.sh/hook-delete-policy"]
        assert policy == "before-hook-creation"


def test_all_features_off_renders_one_server() -> None:
    rendered = Rendered("off")
    assert {kind for kind, _ in rendered.all} == {"ConfigMap", "Service", "StatefulSet"}
    (container,) = pod(rendered.servers()["lookup"])["containers"]
    assert container["args"][0] == "serve"
    assert container["env"] == [{"name": "HPS__SERVER__ROLE", "value": "all"}]
    assert "runAsUser" not in pod(rendered.servers()["lookup"])["securityContext"]
    assert rendered["Service", "hps"]["spec"]["clusterIP"] == "None"
    assert rendered.config()["auth"] == {"mode": "off"}


def test_existing_configuration_replaces_the_generated_one() -> None:
    done = helm_template("--values", values_file("minimal"), "--set", "existingConfigMap=mine")
    found = objects(done.stdout)
    assert "hps" not in [each["metadata"]["name"] for each in found if each["kind"] == "ConfigMap"]
    (sources,) = [
        volume["projected"]["sources"]
        for each in found
        if each["kind"] == "StatefulSet"
        for volume in pod(each)["volumes"]
        if volume["name"] == "etc"
    ]
    assert sources[0]["configMap"]["name"] == "mine"


@pytest.mark.parametrize("block", documented())
def test_values_in_docs_render(block: str, tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(block)
    models = [] if yaml.safe_load(block).get("models") else ["--set", "models.demo=true"]
    done = helm_template("--values", file, *models)
    assert done.returncode == 0, done.stderr


# -- wrong values ----------------------------------------------------------------------------------


def refused(*words: str) -> str:
    done = helm_template("--values", values_file("minimal"), *words)
    assert done.returncode != 0, f"{words} are taken"
    return done.stderr


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("lookup.replicas=3", ["/lookup", "'replicas'"]),
        ("lookup.replicaCount=three", ["/lookup/replicaCount", "integer"]),
        ("lookup.replicaCount=-1", ["/lookup/replicaCount"]),
        ("triton.mode=beside", ["/triton/mode", "'sidecar'"]),
        ("lookup.resources.limits.memory=4Gib", ["/lookup/resources/limits/memory"]),
        ("lookup.resources.limts.memory=4Gi", ["/lookup/resources", "'limts'"]),
        ("image.digest=sha256:12", ["/image/digest"]),
        ("service.ports.http=70000", ["/service/ports/http"]),
        ("redis.addresses={redis}", ["/redis/addresses/0"]),
        ("config.server.htpp.port=1", ["/config/server", "'htpp'"]),
        ("config.tiers.cpu_cache.capacity_bytes=much", ["/config/tiers/cpu_cache/capacity_bytes"]),
        ("config.tiers.rocksdb.layout=rows", ["/config/tiers/rocksdb/layout", "'native'"]),
        ("unknown=1", ["'unknown'"]),
        ("models.fetch.enabled=true", ["models: models.fetch and models.demo are set"]),
        ("tls.enabled=true", ["tls.existingSecret"]),
        ("tls.mtls=true", ["tls.mtls", "tls.enabled=true"]),
        ("tls.existingSecret=hps-tls", ["tls.existingSecret", "tls.enabled=true"]),
        (
            "redis.addresses={r:1},redis.tls.existingSecret=redis",
            ["redis.tls.existingSecret", "redis.tls.enabled=true"],
        ),
        (f"image.digest=sha256:{'a' * 64},frontend.gpu.count=1", ["image.gpuDigest", "frontend.gpu"]),
        ("existingConfigMap=mine,networkPolicy.enabled=true", ["networkPolicy.stores"]),
        ("ingest.enabled=true", ["ingest.enabled", "kafka.bootstrapServers"]),
        ("triton.mode=external", ["triton.url"]),
        ("triton.url=triton:8001", ["triton.url", "found none"]),
        ("triton.mode=sidecar", ["triton.modelRepository.volume"]),
        ("redis.existingSecret=redis", ["redis.existingSecret", "redis.addresses"]),
        ("kafka.security.protocol=SASL_SSL", ["kafka.security", "mechanism"]),
        ("kafka.security.mechanism=PLAIN", ["kafka.security.mechanism"]),
        ("lookup.checkpoints.enabled=true", ["lookup.checkpoints.volume"]),
        ("existingConfigMap=mine,config.server.docs=false", ["config: existingConfigMap"]),
        ("frontend.keda.enabled=true,frontend.autoscaling.enabled=true", ["frontend.keda.enabled"]),
        ("frontend.autoscaling.maxReplicas=1", ["frontend.autoscaling.maxReplicas"]),
        ("config.server.workers=2", ["config.server.workers", "lookup.extraArgs"]),
        ("dev.redis.enabled=true,redis.addresses={r:1}", ["redis.addresses", "dev.redis.enabled"]),
        ("frontend.keda.enabled=true,frontend.keda.minReplicas=0", ["frontend.keda.minReplicas"]),
        (
            "frontend.keda.enabled=true,frontend.keda.threshold=0,frontend.keda.targetCPU=null",
            ["frontend.keda", "triggers"],
        ),
        (
            "lookup.autoscaling.enabled=true,lookup.autoscaling.targetCPU=null",
            ["lookup.autoscaling", "podMetrics"],
        ),
        ("service.headless=true,service.type=LoadBalancer", ["service.headless", "ClusterIP"]),
        ("gateway.enabled=true", ["gateway.parentRefs"]),
        ("gateway.enabled=true,gateway.parentRefs[0].name=g", ["gateway.hosts"]),
        (
            "gateway.enabled=true,gateway.parentRefs[0].name=g,gateway.hosts={a},gateway.grpcHosts={a}",
            ["gateway.grpcHosts"],
        ),
        ("kafka.security.caKey=ca.crt", ["kafka.security.caKey", "caSecret"]),
        (
            "kafka.security.protocol=SSL,kafka.security.certificateKey=user.crt",
            ["kafka.security.certificateKey", "keyKey"],
        ),
        (
            "kafka.security.existingSecret=k,kafka.security.caKey=ca.crt",
            ["kafka.security.protocol", "PLAINTEXT"],
        ),
    ],
)  # fmt: skip
def test_invalid_values_are_rejected_by_name(given: str, named: list[str]) -> None:
    message = refused("--set", given)
    missing = [each for each in named if each not in message]
    assert not missing, f"{missing} not in:\n{message}"


def test_render_rejects_a_missing_model_source() -> None:
    done = helm_template()
    assert "models: none is set; set one of models.volume" in done.stderr
    assert helm_template("--namespace", "other", "--kube-version", "1.28.0").returncode != 0


def test_remote_repository_is_downloaded_by_each_pod() -> None:
    """Lookup nodes keep versions on their volume; credentials are the Secret's entries."""
    remote = "models.demo=false,models.uri=s3://bucket/models,models.credentialsSecret=s3"
    done = helm_template("--set", remote, "--set", "networkPolicy.enabled=false")
    assert done.returncode == 0, done.stderr
    found = [each for each in yaml.safe_load_all(done.stdout) if each]
    (configuration,) = [
        yaml.safe_load(each["data"]["config.yaml"])
        for each in found
        if each["kind"] == "ConfigMap" and "config.yaml" in each.get("data", {})
    ]
    assert configuration["models"] == {
        "repository": "s3://bucket/models",
        "download": {"folder": "/var/lib/hps/models"},
    }
    servers = [
        container
        for each in found
        if each["kind"] in ("Deployment", "StatefulSet")
        for container in each["spec"]["template"]["spec"]["containers"]
    ]
    assert {each["name"] for each in servers} >= {"lookup", "frontend"}
    for server in servers:
        assert {"secretRef": {"name": "s3"}} in server["envFrom"]
        folders = [
            e["value"] for e in server["env"] if e["name"] == "HPS__MODELS__DOWNLOAD__FOLDER"
        ]
        assert folders == (["/var/lib/hps/data/models"] if server["name"] == "lookup" else [])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("models.uri=s3://user:secret@bucket/m", "/models/uri"),
        ("models.uri=s3://bucket/m,models.demo=true", "models.demo and models.uri are set"),
        (
            "models.demo=true,models.credentialsSecret=s3",
            "models.credentialsSecret: needs models.uri",
        ),
    ],
)
def test_wrong_remote_repository_is_refused(given: str, said: str) -> None:
    done = helm_template("--set", given)
    assert done.returncode
    assert said in done.stderr
