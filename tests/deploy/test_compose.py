"""``docker-compose up``, really: services come up healthy and answer, whatever is replaced or killed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.peers.process import free_ports
from benchmarks.peers.triton import start_triton
from hps.client import Admin, Client
from hps.errors import Unavailable
from hps.models.repository import Repository
from hps.triton.export import export_dense
from hps.updates import Producer
from tests.deploy.compose_file import example, services
from tests.deploy.containers import Engine, Project
from tests.integration.conftest import network, triton_ready, write_models
from tests.support.deployment import Ask, Load
from tests.support.waiting import until

__all__ = ["triton_ready"]
pytestmark = [pytest.mark.containers, pytest.mark.slow, pytest.mark.timeout(1800)]

CORE = [name for name, s in services().items() if "profiles" not in s and s["restart"] != "no"]
ANEW = ("--detach", "--no-build", "--pull", "never", "--no-deps")
PATIENCE_S = 180.0
USERS = np.arange(40, dtype=np.int64)


@dataclass(frozen=True)
class Front:
    """A front end, as `Load` knows them: its addresses, and whether it says that it is ready."""

    http: str
    grpc: str

    def ask(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://{self.http}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except OSError:
            return 0, ""

    @property
    def ready(self) -> bool:
        return self.ask("/v2/health/ready")[0] == 200


@dataclass(frozen=True)
class Stack:
    """The services, their ports by the variables of ``.env.example``, and what was said while they began."""

    engine: Engine
    project: Project
    ports: dict[str, int]
    models: Path
    told: str

    @property
    def front(self) -> Front:
        http, grpc = self.ports["HPS_HTTP_PORT"], self.ports["HPS_GRPC_PORT"]
        return Front(f"127.0.0.1:{http}", f"127.0.0.1:{grpc}")

    @property
    def admin(self) -> str:
        return f"http://127.0.0.1:{self.ports['HPS_ADMIN_PORT']}"

    def health(self, service: str) -> str:
        state = self.engine.inspect("container", self.project.container(service))["State"]
        return str(state["Health"]["Status"]) if state["Running"] else "not running"

    def until_healthy(self, *names: str) -> None:
        until(lambda: all(self.health(name) == "healthy" for name in names), PATIENCE_S)

    def nodes(self) -> list[str]:
        """How the front end finds the lookup nodes."""
        try:
            with Admin(self.admin) as admin:
                return [each["state"] for each in admin.status()["lookup_nodes"]]
        except Unavailable:
            return []


@contextmanager
def healthchecks(engine: Engine) -> Iterator[None]:
    """Podman leaves the time of healthchecks to systemd; here it is a thread."""
    end = threading.Event()

    def run() -> None:
        while not end.wait(1.0):
            for name in engine.podman("ps", "--quiet", "--filter", "health=starting").split():
                engine.podman("healthcheck", "run", name, check=False)
            for name in engine.podman("ps", "--quiet", "--filter", "health=unhealthy").split():
                engine.podman("healthcheck", "run", name, check=False)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


@pytest.fixture(scope="module")
def stack(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("compose")
    names = [name for name in example() if name.endswith("_PORT")]
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    settings = {name: str(port) for name, port in ports.items()}
    with engine.socket() as url:
        project = Project(engine, url, f"hps-test-{ports['HPS_HTTP_PORT']}", settings)
        try:
            told = project("run", "--rm", "--no-deps", "-T", "demo")
            models = import_clicks(project, folder)
            with healthchecks(engine):
                project("up", *ANEW[:-1])
                made = Stack(engine, project, ports, models, told)
                made.until_healthy(*CORE)
                yield made
        finally:
            (engine.store / "compose.log").write_text(project.logs())
            project("down", "--volumes", "--timeout", "10")


def import_clicks(project: Project, folder: Path) -> Path:
    """``clicks`` of the tests, through ``hps model import`` into the services' repository; a repository with
    the same on this machine."""
    models, given = folder / "models", folder / "given"
    write_models(models)
    given.mkdir()
    arrays = {}
    for name, table in Repository(models).open("clicks").tables.items():
        rows = len(np.fromfile(table.folder / "key", "<i8"))
        arrays[f"{name}_keys"] = np.fromfile(table.folder / "key", "<i8")
        arrays[name] = np.fromfile(table.folder / "emb_vector", "<f4").reshape(rows, -1)
    np.savez(given / "tables.npz", **arrays)
    shutil.copy(models / "clicks/model.yaml", given / "model.yaml")
    (given / "net.onnx").write_bytes(network())
    for path in (folder, given):
        path.chmod(0o755)
    project(
        "run", "--rm", "--no-deps", "-T", "--volume", f"{given}:/given:ro", "demo",
        "model", "import", "/given/tables.npz", "--to", "/var/lib/hps/models", "--name", "clicks",
        "--table", "users=users", "--keys", "users=users_keys",
        "--table", "items=items", "--keys", "items=items_keys",
        "--spec", "/given/model.yaml", "--dense", "/given/net.onnx",
    )  # fmt: skip
    return models


def asked(users: np.ndarray = USERS) -> tuple[dict[str, Any], dict[str, Any]]:
    features = {
        "user": users[:, None],
        "item": users[:, None] % 40,
        "history": np.stack([users % 7, users % 11], 1),
    }
    return features, {"dense": np.linspace(-1, 1, 3 * len(users), dtype=np.float32).reshape(-1, 3)}


def expected(rows: np.ndarray, users: np.ndarray = USERS) -> np.ndarray:
    """The network's scores, in NumPy; ``rows (n, 4)`` of the users."""
    features, dense = asked(users)
    item = features["item"] + np.arange(2) / 8
    history = features["history"].mean(1, keepdims=True) + np.arange(2) / 8
    wide = np.concatenate([rows, item, history, dense["dense"]], 1).astype(np.float64)
    logit: np.ndarray = wide @ np.linspace(-1, 1, 11, dtype=np.float32)
    return logit


def logits(client: Client) -> np.ndarray:
    found: np.ndarray = client.predict("clicks", *asked()).outputs["logit"].ravel()
    return found


def test_the_demo_is_served_and_the_printed_request_answers(stack: Stack) -> None:
    command = next(line.strip() for line in stack.told.splitlines() if "curl -s" in line)
    assert f"{stack.front.http}/" in command
    answer = json.loads(subprocess.check_output(command, shell=True))
    score = next(o["data"][0] for o in answer["outputs"] if o["name"] == "click")
    told = re.search(r"click for this request is (\d+\.\d+)", stack.told)
    assert told is not None
    assert abs(score - float(told[1])) < 2e-6


def test_every_service_is_hardened_where_it_runs(stack: Stack) -> None:
    for name in CORE:
        found = stack.engine.inspect("container", stack.project.container(name))
        assert found["HostConfig"]["ReadonlyRootfs"], name
        assert found["EffectiveCaps"] in (None, []), name
        status = Path(f"/proc/{found['State']['Pid']}/status").read_text()
        assert int(re.search(r"^Uid:\s+(\d+)", status, re.MULTILINE)[1]) != 0, name  # type: ignore[index]
        assert re.search(r"^NoNewPrivs:\s+1$", status, re.MULTILINE), name


def test_streamed_rows_are_served_and_scores_are_equal_everywhere(
    stack: Stack, triton_ready: None, tmp_path: Path
) -> None:
    before = USERS[:, None] + np.arange(4) / 8
    rows = np.random.default_rng(5).standard_normal((len(USERS), 4)).astype(np.float32)
    at = stack.front
    with Client(f"http://{at.http}") as rest, Client(f"grpc://{at.grpc}") as other:
        np.testing.assert_allclose(logits(rest), expected(before), rtol=1e-4, atol=1e-4)
        with Producer(f"127.0.0.1:{stack.ports['KAFKA_PORT']}", model="clicks") as producer:
            producer.send("users", USERS, rows)
        fresh = expected(rows)

        def arrived() -> bool:  # at both nodes, which are asked in turns
            return all(np.allclose(logits(rest), fresh, atol=1e-4) for _ in range(20))

        until(arrived)
        by_rest, by_grpc = logits(rest), logits(other)
        assert by_rest.tobytes() == by_grpc.tobytes()
        vectors = rest.lookup("clicks", asked()[0]).vectors
    export_dense(Repository(stack.models).open("clicks"), tmp_path, "python")
    with start_triton(tmp_path) as triton, Client(f"http://{triton.address}") as client:
        inputs = {name: np.ascontiguousarray(array, np.float32) for name, array in vectors.items()}
        answer = client.infer("clicks.dense", {**inputs, **asked()[1]}).outputs["logit"].ravel()
    np.testing.assert_allclose(answer, by_rest, rtol=0, atol=1e-5)


@contextmanager
def load(stack: Stack, *more: Front) -> Iterator[Load]:
    """Requests over REST and gRPC to the front ends that are ready, none of them repeated. At the end all
    have been answered, with what is the answer now."""

    def asking(scheme: str) -> Callable[[str], Ask]:
        def at(address: str) -> Ask:
            client = Client(f"{scheme}://{address}", retries=0)
            clients.callback(client.close)
            return lambda: whole(client)

        return at

    with ExitStack() as clients:
        make = {"http": asking("http"), "grpc": asking("grpc")}
        now = make["http"](stack.front.http)()
        with Load([stack.front, *more], make) as running:  # type: ignore[list-item]
            yield running
            running.more()
        assert running.failures == []
        assert set(running.answers) == {now}


def whole(client: Client) -> bytes:
    """Scores of an answer that lacks nothing."""
    answer = client.predict("clicks", *asked())
    assert not answer.degraded, answer.degraded
    assert not answer.defaulted
    return bytes(answer.outputs["logit"].tobytes())


def test_every_service_of_ours_is_replaced_and_no_request_fails(stack: Stack) -> None:
    http, grpc = free_ports(2)
    second, name = Front(f"127.0.0.1:{http}", f"127.0.0.1:{grpc}"), f"{stack.project.name}-second"
    published = ("--publish", f"{second.http}:8000", "--publish", f"{second.grpc}:8001")
    stack.project("run", "--detach", "--no-deps", "--name", name, *published, "frontend")
    try:
        until(lambda: second.ready, PATIENCE_S)
        with load(stack, second) as running:
            for service in ("lookup-1", "lookup-2", "ingest", "frontend"):
                gone = stack.project.container(service)
                stack.project("up", *ANEW, "--force-recreate", service)
                assert stack.project.container(service) != gone
                stack.until_healthy(service)
                until(lambda: set(stack.nodes()) == {"ready"}, PATIENCE_S)
                running.more()
        print(f"four services replaced under {running.answers.total()} requests")
    finally:
        stack.engine.podman("rm", "--force", "--time", "10", name, check=False)


def test_a_lookup_node_is_killed_and_no_request_fails_and_it_comes_back(stack: Stack) -> None:
    container = stack.project.container("lookup-2")
    before = stack.engine.inspect("container", container)["State"]["Pid"]
    with load(stack) as running:
        os.kill(before, signal.SIGKILL)

        def again() -> bool:
            state = stack.engine.inspect("container", container)["State"]
            return bool(state["Running"] and state["Pid"] != before)

        until(again, PATIENCE_S)
        until(lambda: set(stack.nodes()) == {"ready"}, PATIENCE_S)
    print(f"a lookup node killed under {running.answers.total()} requests")
