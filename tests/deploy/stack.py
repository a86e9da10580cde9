"""The services of ``docker-compose.yml``, started for tests, and a model of the tests' own in them."""

from __future__ import annotations

import json
import re
import shutil
import threading
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.process import free_ports
from hps.client import Admin, Client
from hps.errors import Unavailable
from hps.models.repository import Repository
from tests.deploy.compose_file import example, services
from tests.deploy.containers import Engine, Project
from tests.support.small_models import network, write_models
from tests.support.waiting import until

CORE = [name for name, s in services().items() if "profiles" not in s and s["restart"] != "no"]
UP = ("up", "--detach", "--wait", "--no-build", "--pull", "never")
PATIENCE_S = 300.0
START_S = 900.0
USERS = np.arange(40, dtype=np.int64)


def of_profile(profile: str) -> list[str]:
    """The services that it adds."""
    return [n for n, s in services().items() if profile in s.get("profiles", ())]


@dataclass(frozen=True)
class Front:
    """A front end for `Load`: its addresses and readiness."""

    http: str
    grpc: str

    def serves(self, model: str) -> bool:
        return self.ask(f"/v2/models/{model}/ready")[0] == 200

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
    """The services, and their ports by the variables of ``.env.example``."""

    engine: Engine
    project: Project
    ports: dict[str, int]

    @property
    def front(self) -> Front:
        http, grpc = self.ports["HPS_HTTP_PORT"], self.ports["HPS_GRPC_PORT"]
        return Front(f"127.0.0.1:{http}", f"127.0.0.1:{grpc}")

    def url(self, port: str) -> str:
        return f"http://127.0.0.1:{self.ports[port]}"

    def up(self, profile: str) -> list[str]:
        """Start a profile by ``docker compose --profile P up --detach --wait``; return its services."""
        # Podman tells of networks otherwise than Docker, so that Compose would make anew what runs.
        self.project("--profile", profile, *UP, "--no-recreate", timeout=START_S)
        return of_profile(profile)

    def get(self, port: str, path: str, data: bytes | None = None) -> Any:
        """Request ``path`` and return its JSON. Raises OSError for an error status."""
        with urllib.request.urlopen(self.url(port) + path, data, timeout=180) as answer:
            return json.loads(answer.read() or b"null")

    def health(self, service: str) -> str:
        state = self.engine.inspect("container", self.project.container(service))["State"]
        return str(state["Health"]["Status"]) if state["Running"] else "not running"

    def until_healthy(self, *names: str) -> None:
        until(lambda: all(self.health(name) == "healthy" for name in names), PATIENCE_S)

    def nodes(self) -> list[str]:
        """The states of the lookup nodes, from the front end's status."""
        try:
            with Admin(self.url("HPS_ADMIN_PORT")) as admin:
                return [each["state"] for each in admin.status()["lookup_nodes"]]
        except Unavailable:
            return []


@contextmanager
def healthchecks(engine: Engine) -> Iterator[None]:
    """Podman leaves the time of healthchecks to systemd; here it is a thread."""
    end = threading.Event()

    def run() -> None:
        while not end.wait(1.0):
            for health in ("starting", "unhealthy"):
                for name in engine.podman("ps", "-q", "--filter", f"health={health}").split():
                    engine.podman("healthcheck", "run", name, check=False)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


@contextmanager
def started(engine: Engine) -> Iterator[Stack]:
    """The services without a profile, healthy."""
    names = [name for name in example() if name.endswith("_PORT")]
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    settings = {name: str(port) for name, port in ports.items()}
    settings |= {"HPS_MODEL": "clicks", "LOAD_SECONDS": "5"}
    settings["HPS_START_PERIOD"] = f"{START_S:.0f}s"
    with engine.socket() as url:
        project = Project(engine, url, f"hps-test-{ports['HPS_HTTP_PORT']}", settings)
        try:
            with healthchecks(engine):
                project(*UP, timeout=START_S)
                yield Stack(engine, project, ports)
        finally:
            project.down()


def hardened(stack: Stack, names: Iterable[str]) -> None:
    for name in names:
        found = stack.engine.inspect("container", stack.project.container(name))
        assert found["HostConfig"]["ReadonlyRootfs"], name
        assert found["EffectiveCaps"] in (None, []), name
        if found["State"]["Running"]:
            status = Path(f"/proc/{found['State']['Pid']}/status").read_text()
            assert not re.search(r"^Uid:\s+0", status, re.MULTILINE), name
            assert re.search(r"^NoNewPrivs:\s+1$", status, re.MULTILINE), name


def import_clicks(stack: Stack, folder: Path) -> None:
    """``clicks`` of the tests, brought into the running services as docs/containers.md has it."""
    write_models(folder / "models")
    given = folder / "given"
    given.mkdir()
    arrays = {}
    for name, table in Repository(folder / "models").open("clicks").tables.items():
        rows = len(np.fromfile(table.folder / "key", "<i8"))
        arrays[f"{name}_keys"] = np.fromfile(table.folder / "key", "<i8")
        arrays[name] = np.fromfile(table.folder / "emb_vector", "<f4").reshape(rows, -1)
    np.savez(given / "tables.npz", **arrays)
    shutil.copy(folder / "models/clicks/model.yaml", given / "model.yaml")
    (given / "net.onnx").write_bytes(network())
    for path in (folder, given):
        path.chmod(0o755)
    stack.project.once(
        "--volume", f"{given}:/given:ro", "demo",
        "model", "import", "/given/tables.npz", "--to", "/var/lib/hps/models", "--name", "clicks",
        "--table", "users=users", "--keys", "users=users_keys",
        "--table", "items=items", "--keys", "items=items_keys",
        "--spec", "/given/model.yaml", "--dense", "/given/net.onnx",
    )  # fmt: skip
    stack.project("restart", "ingest")
    stack.until_healthy("ingest")
    for node in ("LOOKUP_1_ADMIN_PORT", "LOOKUP_2_ADMIN_PORT"):
        stack.get(node, "/v2/repository/models/clicks/load", b"{}")
    until(lambda: stack.front.serves("clicks"), PATIENCE_S)


def request_inputs(users: np.ndarray = USERS) -> tuple[dict[str, Any], dict[str, Any]]:
    features = {
        "user": users[:, None],
        "item": users[:, None] % 40,
        "history": np.stack([users % 7, users % 11], 1),
    }
    return features, {"dense": np.linspace(-1, 1, 3 * len(users), dtype=np.float32).reshape(-1, 3)}


def expected(rows: np.ndarray, users: np.ndarray = USERS) -> np.ndarray:
    """The network's scores, in NumPy; ``rows (n, 4)`` of the users."""
    features, dense = request_inputs(users)
    item = features["item"] + np.arange(2) / 8
    history = features["history"].mean(1, keepdims=True) + np.arange(2) / 8
    wide = np.concatenate([rows, item, history, dense["dense"]], 1).astype(np.float64)
    logit: np.ndarray = wide @ np.linspace(-1, 1, 11, dtype=np.float32)
    return logit


def logits(client: Client) -> np.ndarray:
    found: np.ndarray = client.predict("clicks", *request_inputs()).outputs["logit"].ravel()
    return found
