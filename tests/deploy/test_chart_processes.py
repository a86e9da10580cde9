"""The rendered chart's commands and configuration, run as processes with paths and ports of this machine.

A front end, a lookup node, ``helm test``, the checkpoint job, a new node."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hps
from benchmarks.peers.process import free_ports, serving
from benchmarks.peers.triton import start_triton
from hps.cli.demo_data import FOLDER
from hps.client import Admin
from hps.config import load_config
from hps.models.repository import Repository
from hps.triton.export import export_dense
from tests.deploy.charts import (
    Rendered,
    helm_template,
    main_container,
    objects,
    pod,
    values_file,
)
from tests.support.certificates import made
from tests.support.small_models import write_models

# What is started for the first test counts as that test's time.
pytestmark = pytest.mark.timeout(900)
CHECKPOINTS = (
    "lookup.checkpoints.enabled=true,lookup.checkpoints.volume.persistentVolumeClaim.claimName=c"
)


class Pods:
    """The rendering's containers; files are below ``folder``, hosts are loopback ports."""

    def __init__(self, folder: Path) -> None:
        done = helm_template("--values", values_file("minimal"), "--set", CHECKPOINTS)
        assert done.returncode == 0, done.stderr
        found = {(each["kind"], each["metadata"]["name"]): each for each in objects(done.stdout)}
        self.lookup = found["StatefulSet", "hps-lookup"]
        self.frontend = found["Deployment", "hps-frontend"]
        self.job = found["CronJob", "hps-checkpoints"]
        self.test = found["Pod", "hps-test"]
        self.keys: dict[str, str] = found["Secret", "hps-keys"]["stringData"]
        self.folder = folder
        self.grpc, self.admin, self.http, self.frontend_admin = free_ports(4)
        self.lookup_ports = ports(grpc=self.grpc, admin=self.admin, http=0)
        self.frontend_ports = ports(http=self.http, admin=self.frontend_admin, grpc=0)
        shutil.copytree(FOLDER, folder / "var/models")
        (folder / "etc/auth").mkdir(parents=True)
        for name, text in self.keys.items():
            (folder / "etc/auth" / name).write_text(text)
            (folder / "etc/auth" / name).chmod(0o440)
        config = found["ConfigMap", "hps"]["data"]["config.yaml"]
        (folder / "etc/config.yaml").write_text(self.here(config))

    def here(self, text: str) -> str:
        """With this machine's paths and ports."""
        text = text.replace("/var/lib/hps", str(self.folder / "var"))
        text = text.replace("/etc/hps", str(self.folder / "etc"))
        text = re.sub(r"dns:///[\w.-]+:8001", f"127.0.0.1:{self.grpc}", text)
        text = re.sub(r"[\w-]+-lookup-0\.[\w.-]+:8002", f"127.0.0.1:{self.admin}", text)
        return re.sub(r"hps\.\w+\.svc\.cluster\.local:8000", f"127.0.0.1:{self.http}", text)

    def command(self, container: Any, *more: str) -> list[str]:
        return [sys.executable, "-m", "hps.cli.main", *map(self.here, container["args"]), *more]

    def environment(self, container: Any) -> dict[str, str]:
        """The container's, its Secret looked up."""
        given = dict(os.environ)
        for each in container["env"]:
            key = each.get("valueFrom", {}).get("secretKeyRef", {}).get("key")
            given[each["name"]] = self.keys[key] if key else each["value"]
        return given


def ports(**chosen: int) -> list[str]:
    words = []
    for name, port in chosen.items():
        words += ["--set", f"server.{name}.host=127.0.0.1", "--set", f"server.{name}.port={port}"]
    return [*words, "--set", "server.drain_delay_s=0"]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pods]:
    pods = Pods(tmp_path_factory.mktemp("pods"))
    ready = "/v2/health/ready"
    with ExitStack() as stack:
        for workload, admin, given in (
            (pods.lookup, pods.admin, pods.lookup_ports),
            (pods.frontend, pods.frontend_admin, pods.frontend_ports),
        ):
            container = main_container(workload)
            command, env = pods.command(container, *given), pods.environment(container)
            stack.enter_context(serving(command, admin, ready_path=ready, env=env))
        yield pods


def run(command: Sequence[str], env: dict[str, str]) -> str:
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def verify(container: Any) -> list[str]:
    """The test's command, by this Python."""
    python, *rest = container["command"]
    assert python == "python3"
    return [sys.executable, *rest]


def test_helm_test_passes_for_healthy_servers(running: Pods) -> None:
    (container,) = running.test["spec"]["containers"]
    command = [*verify(container), *map(running.here, container["args"])]
    printed = run(command, running.environment(container))
    lines = printed.splitlines()
    assert lines[0].startswith("health: ready")
    assert any("a prediction" in line for line in lines)
    assert any("a lookup" in line for line in lines)
    assert any("an update, written, read and deleted" in line for line in lines)
    assert lines[-1] == "hps is well"


def test_helm_test_fails_in_one_line_for_an_unknown_api_key(running: Pods) -> None:
    (container,) = running.test["spec"]["containers"]
    command = [*verify(container), running.here(container["args"][0])]
    env = running.environment(container) | {"HPS_API_KEY": "a-key-that-nobody-knows"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_helm_test_presents_its_certificate(tmp_path: Path) -> None:
    (test,) = Rendered("external").of("Pod")
    (container,) = test["spec"]["containers"]
    root = made(tmp_path, "ca")
    files = dict(
        zip(("tls.key", "tls.crt"), made(tmp_path, "tls", ["IP:127.0.0.1"], root), strict=True)
    )
    (tls,) = [each["value"] for each in container["env"] if each["name"] == "HPS_TLS"]
    http, admin = free_ports(2)
    shown = {"certificate_file": str(files["tls.crt"]), "key_file": str(files["tls.key"])}
    settings = {
        "models": {"repository": str(FOLDER)},
        "tiers": {"rocksdb": {"path": str(tmp_path / "rocksdb")}},
        "server": {
            "http": {"port": http, "tls": {**shown, "client_ca_file": str(root[1])}},
            "grpc": None,
            "admin": {"port": admin},
        },
    }
    (tmp_path / "config.yaml").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "hps.cli.main", "serve", "--config", f"{tmp_path}/config.yaml"]
    with serving(command, admin, ready_path="/v2/health/ready"):
        env = {**os.environ, "HPS_TLS": tls.replace("/tls/", f"{tmp_path}/")}
        printed = run([*verify(container), f"https://127.0.0.1:{http}"], env)
    assert printed.splitlines()[-1] == "hps is well"


@pytest.mark.parametrize("role", ["lookup", "frontend"])
def test_doctor_in_a_pod_uses_its_role(running: Pods, role: str) -> None:
    workload: Any = getattr(running, role)
    given: list[str] = getattr(running, f"{role}_ports")
    config = ["--config", str(running.folder / "etc/config.yaml")]
    command = [sys.executable, "-m", "hps.cli.main", "doctor", "--json", *config, *given]
    printed = run(command, running.environment(main_container(workload)))
    looked_at = {check["name"] for check in json.loads(printed)}
    assert ("database" in looked_at) == (role == "lookup")
    assert (f"lookup node 127.0.0.1:{running.grpc}" in looked_at) == (role == "frontend")


def test_new_node_starts_from_a_checkpoint_of_another(running: Pods, tmp_path: Path) -> None:
    with Admin(f"http://127.0.0.1:{running.admin}", api_key=running.keys["admin-key"]) as node:
        table = node.ask("/v1/tables")["tables"][0]
        rows = f"/v1/tables/{table['model']}/{table['name']}/rows"
        written = [0.25] * int(table["dim"])
        node.ask(rows, {"keys": [2**61 + 1], "vectors": [written]})
        job = running.job["spec"]["jobTemplate"]["spec"]["template"]["spec"]
        (container,) = job["containers"]
        run(running.command(container), running.environment(container))
        node.ask(rows, {"deleted": [2**61 + 1]})
    (first,) = [c for c in pod(running.lookup)["initContainers"] if c["name"] == "bootstrap"]
    data = ["--set", f"tiers.rocksdb.path={tmp_path}/rocksdb"]
    assert "is restored from" in run(running.command(first, *data), dict(os.environ))
    assert "nothing restored" in run(running.command(first, *data), dict(os.environ))
    # The new node has the rows that no model file has.
    config = load_config(running.folder / "etc/config.yaml", data[1::2])
    with hps.open(config) as new:
        found = new.lookup(
            table["model"], {table["name"]: [2**61 + 1]}, want_source=True, by_table=True
        )
    assert found.vectors[table["name"]].tolist() == [written]


def test_front_end_with_triton_sidecar(
    program: Callable[[str], str], triton_ready: None, tmp_path: Path
) -> None:
    """It starts with the chart's arguments, passes the chart's probe, and answers the front end."""
    rendered = Rendered("everything")
    sidecar = pod(rendered.servers()["frontend"])["initContainers"][-1]
    http, grpc, metrics = free_ports(3)

    def here(text: str) -> str:
        for there, port in ((9000, http), (9001, grpc), (9002, metrics)):
            text = text.replace(str(there), str(port))
        return text

    # Releases from 26.04 on need an option to allow what this release allows.
    newer = "--allow-client-shm=true"
    repository, *arguments = sidecar["args"]
    assert (sidecar["command"], repository) == (["tritonserver"], "--model-repository=/models")
    given = tuple(here(each) for each in arguments if each != newer)
    assert len(given) == len(arguments) - 1
    write_models(tmp_path / "models")
    export_dense(Repository(tmp_path / "models").open("clicks"), tmp_path / "triton", "python")
    dense = json.loads(here(json.dumps(rendered.config()["dense"])))
    dense["triton"] |= {"fallback": False, "timeout_ms": 60_000}
    ports = (http, grpc, metrics)
    with start_triton(tmp_path / "triton", ports, arguments=given, timeout_s=300):
        curl, *words = sidecar["startupProbe"]["exec"]["command"]
        assert run([program(curl), *map(here, words)], dict(os.environ)) == ""
        found = [scores(tmp_path, str(n), each) for n, each in enumerate((dense, {}))]
    np.testing.assert_allclose(*found, atol=1e-6)


def scores(folder: Path, name: str, dense: Any) -> Any:
    """Scores of a node with the settings ``dense``."""
    settings = {
        "models": {"repository": str(folder / "models")},
        "tiers": {"rocksdb": {"path": str(folder / name)}},
        "dense": dense,
    }
    keys = {"user": [[7]], "item": [[3], [-9]], "history": [[1, 2, 3]] * 2}
    with hps.open(settings) as node:
        return node.predict("clicks", keys, {"dense": np.full((2, 3), 0.5, "f4")}).outputs["score"]
