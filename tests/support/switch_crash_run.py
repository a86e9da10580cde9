"""A node killed with ``kill -9`` at random moments of a download, load, switch, label or rollback.

A publisher is killed in the same way. After each kill the node starts again on the same folders. It must
serve what was served before the change or after it, and every served version must be whole: rows bit by bit,
and the network of the same version."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.hps_server import Hps, start_hps
from hps.config.model_schema import ModelSpec
from hps.models.version_writer import write_version
from tests.support.object_store import ObjectStore

MODEL, ROWS, DIM = "m", 20_000, 8
TABLES = ("left", "right")
BATCH = 4000
ACTIONS = ("publish", "download", "load", "switch", "label", "rollback")
LABELS = ("stable", "canary")
MOST_SERVED = 4
_LONGER = 1.2
"""Factor of the expected duration of a change after a kill in it: kills shall hit its end, too."""
SPEC = ModelSpec.model_validate(
    {
        "name": MODEL,
        "max_batch_size": BATCH,
        "tables": [{"name": name, "dim": DIM} for name in TABLES],
        "features": [{"name": name, "table": name, "hotness": 1} for name in TABLES],
        "dense": {"inputs": [], "outputs": [{"name": "found", "shape": [-1, 3]}]},
    }
)


def rows_of(version: int, table: str) -> NDArray[np.float32]:
    """The rows of keys 0, 1, … of a version's table; the first number is the version."""
    rows = np.random.default_rng((version, TABLES.index(table))).random((ROWS, DIM), np.float32)
    rows[:, 0] = version
    return rows


def network(version: int) -> bytes:
    """Returns the first numbers of both rows, and its version."""
    from onnx import TensorProto, helper, numpy_helper

    held = [
        numpy_helper.from_array(np.array([0]), "first"),
        numpy_helper.from_array(np.array([version], np.float32), "version"),
        numpy_helper.from_array(np.zeros(1, np.float32), "zero"),
    ]
    node = helper.make_node
    nodes = [
        node("Gather", ["left", "first"], ["a"], axis=1),
        node("Gather", ["right", "first"], ["b"], axis=1),
        node("Mul", ["a", "zero"], ["nothing"]),
        node("Add", ["nothing", "version"], ["c"]),
        node("Concat", ["a", "b", "c"], ["found"], axis=1),
    ]

    def tensor(name: str, width: int) -> Any:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", width])

    inputs, outputs = [tensor(name, DIM) for name in TABLES], [tensor("found", 3)]
    graph = helper.make_graph(nodes, MODEL, inputs, outputs, held)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(made.SerializeToString())


@dataclass(frozen=True)
class Served:
    """What a node serves: its current version, the one before it if known, labels, all versions."""

    current: int
    previous: int | None = None
    labels: Mapping[str, int] = field(default_factory=dict)
    versions: frozenset[int] = frozenset()

    def same(self, other: Served) -> bool:
        """Without `previous`, which no route returns."""
        return (self.current, dict(self.labels)) == (other.current, dict(other.labels))

    def switched(self, version: int) -> Served:
        if version == self.current:
            return self
        return replace(self, current=version, previous=self.current)


@dataclass
class SwitchCrashRun:
    """One node in an empty ``folder`` on a repository in ``store``; its actions follow ``seed``.

    ``workers``: its number of worker processes. `run` raises AssertionError for whatever is wrong.
    ``killed`` counts kills by action, ``in_flight`` those before the action was acknowledged."""

    folder: Path
    store: ObjectStore
    seed: int = 1
    prefix: str = "crashes"
    workers: int = 0
    killed: Counter[str] = field(default_factory=Counter)
    in_flight: Counter[str] = field(default_factory=Counter)
    changed: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)
        self._uri = f"s3://bucket/{self.prefix}"
        self._published: list[int] = []
        self._abandoned: list[int] = []
        self._downloaded: set[int] = set()
        self._number = 0
        self._took = dict.fromkeys(ACTIONS, 0.03) | {"publish": 2.0, "download": 0.3, "load": 0.1}
        self._resources = ExitStack()
        self._node: Hps
        self._served: Served

    # -- the run -----------------------------------------------------------------------------------

    def run(self, kills: int) -> None:
        """Kill ``kills`` times, each action about as often."""
        try:
            for _ in range(3):
                self._publish(None)
            self._start()
            self._served = Served(self._published[-1])
            self._check()
            for i in range(kills):
                action = ACTIONS[i % len(ACTIONS)]
                getattr(self, f"_kill_{action}")()
                self._tidy()
        finally:
            self._resources.close()

    def _start(self) -> None:
        models = {
            "repository": self._uri,
            "download": {
                "folder": str(self.folder / "cache"),
                "chunk_bytes": 65536,
                "parallel": 2,
            },
            "rollback_s": 2.0,
        }
        limits = {"workers": self.workers}
        self._node = self._resources.enter_context(
            start_hps(self.folder, models=models, limits=limits)
        )

    def _restart(self) -> None:
        log = self._node.log.read_text()
        assert "Traceback" not in log, log[-3000:]
        self._resources.close()
        self._start()

    # -- actions -----------------------------------------------------------------------------------

    def _kill_publish(self) -> None:
        """Kill the publisher: the version is in the store whole, or not at all."""
        number = self._publish(self._moment("publish"))
        self.killed["publish"] += 1
        versions = self._index(every=True)
        if number in versions:
            self.changed["publish"] += 1
            assert self._change("load", version=number, beside=True)[0] == 200
            self._whole(number)
            self._unload(number)

    def _publish(self, kill_after_s: float | None) -> int:
        """Publish another version; returns its number."""
        self._number += 1
        number, local = self._number, self.folder / "local"
        began = time.monotonic()
        code = (
            "import sys; from pathlib import Path\n"
            "from tests.support.switch_crash_run import publish_version\n"
            "publish_version(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(local), str(number), self._uri],
            env={**os.environ, **self.store.environment},
            cwd=Path(__file__).parents[2],
            stderr=subprocess.PIPE,
            text=True,
        )
        with suppress(subprocess.TimeoutExpired):
            process.wait(kill_after_s)
        ended = process.poll() is not None
        process.kill()
        _, errors = process.communicate()
        if ended:
            assert process.returncode == 0, errors
            self._took["publish"] = time.monotonic() - began
            self._published.append(number)
        else:
            self.in_flight["publish"] += 1
            self._took["publish"] *= _LONGER
            self._abandoned.append(number)
        return number

    def _kill_download(self) -> None:
        wanted = [n for n in self._published if n not in self._downloaded]
        if not wanted:
            wanted = [self._publish(None)]
        self._downloaded.add(wanted[-1])
        self._kill_change("download", self._served.switched(wanted[-1]), "load", version=wanted[-1])

    def _kill_load(self) -> None:
        version = self._another(self._published[-6:])
        if version not in self._downloaded:
            self._downloaded.add(version)
            self._change("load", version=version, beside=True)
            self._unload(version)
        self._kill_change("load", self._served.switched(version), "load", version=version)

    def _kill_switch(self) -> None:
        version = self._another(sorted(self._served.versions))
        if version == self._served.current:
            version = self._another(self._published[-3:])
            self._downloaded.add(version)
            assert self._change("load", version=version, beside=True)[0] == 200
            self._observe()
        self._kill_change("switch", self._served.switched(version), "switch", version=str(version))

    def _kill_label(self) -> None:
        version = int(self._random.choice(sorted(self._served.versions)))
        label = str(self._random.choice(LABELS))
        after = replace(self._served, labels={**self._served.labels, label: version})
        self._kill_change("label", after, "label", label=label, version=str(version))

    def _kill_rollback(self) -> None:
        if self._served.previous is None:
            version = self._another(self._published[-3:])
            self._downloaded.add(version)
            assert self._change("load", version=version)[0] == 200
            self._served = self._served.switched(version)
            self._observe()
        assert self._served.previous is not None
        self._kill_change("rollback", self._served.switched(self._served.previous), "rollback")

    def _kill_change(self, action: str, after: Served, verb: str, **parameters: Any) -> None:
        """Kill the node during a change; then it must serve what it did, or ``after``."""
        before, answers = self._served, []
        began = time.monotonic()

        def ask() -> None:
            with suppress(OSError, http.client.HTTPException):
                answers.append(self._change(verb, **parameters))
                self._took[action] = (self._took[action] + time.monotonic() - began) / 2

        asking = threading.Thread(target=ask)
        asking.start()
        time.sleep(self._moment(action))
        os.kill(self._node.process.pid, signal.SIGKILL)
        asking.join()
        assert all(status == 200 for status, _ in answers), answers
        self.killed[action] += 1
        if not answers:
            self.in_flight[action] += 1
            self._took[action] *= (
                _LONGER  # kills shall also hit the end of a change, and what follows
            )
        self._restart()
        self._observe()
        found = self._served
        allowed = (after,) if answers else (before, after)
        matching = [each for each in allowed if each.same(found)]
        assert matching, f"{action}: {found} is none of {allowed}"
        self.changed[action] += matching[-1] is after
        self._served = replace(found, previous=matching[-1].previous)
        self._check()

    # -- what is served ----------------------------------------------------------------------------

    def _check(self) -> None:
        """Every served version is whole, and requests without a version get the current one."""
        self._observe()
        for version in self._served.versions:
            self._whole(version)
        assert self._ask("", np.arange(4))["found"][0, 2] == self._served.current
        for label, version in self._served.labels.items():
            assert self._ask(f"/versions/{label}", np.arange(4))["found"][0, 2] == version

    def _whole(self, version: int) -> None:
        for start in range(0, ROWS, BATCH):
            keys = np.arange(start, start + BATCH)
            found = self._ask(f"/versions/{version}", keys, lookup=True)
            for name in TABLES:
                expected = rows_of(version, name)[keys]
                assert (found[name] == expected).all(), f"version {version}, table {name}"
        assert (self._ask(f"/versions/{version}", np.arange(50))["found"] == version).all()

    def _observe(self) -> None:
        """Read what is served."""
        index = self._index()
        labels = {label: n for n, each in index.items() for label in each["labels"]}
        current = next(n for n, each in index.items() if each["current"])
        self._served = replace(
            getattr(self, "_served", Served(current)),
            current=current,
            labels=labels,
            versions=frozenset(index),
        )

    def _tidy(self) -> None:
        """Stop serving versions beside the current one, once they are many."""
        self._observe()
        if len(self._served.versions) < MOST_SERVED:
            return
        for label in self._served.labels:
            assert self._change("label", label=label, version=None)[0] == 200
        for version in sorted(self._served.versions - {self._served.current}):
            self._unload(version)
        self._observe()

    def _unload(self, version: int) -> None:
        """Stop serving a version beside the current one. The node does not roll back to it any more.

        The request may be rejected: for a label, or because a version kept for a rollback was freed."""
        status, answer = self._change("unload", version=version)
        assert status in (200, 400, 404), answer
        if status == 200 and version == self._served.previous:
            self._served = replace(self._served, previous=None)

    # -- requests ----------------------------------------------------------------------------------

    def _moment(self, action: str) -> float:
        return float(self._random.uniform(0, 1.2 * self._took[action]))

    def _another(self, versions: list[int]) -> int:
        """One of ``versions`` that is not the current one, if there is one."""
        served = getattr(self, "_served", None)
        others = [n for n in versions if served is None or n != served.current]
        return int(self._random.choice(others or versions))

    def _index(self, *, every: bool = False) -> dict[int, dict[str, Any]]:
        status, found = self._request("/v2/repository/index", {"ready": not every})
        assert status == 200, found
        return {
            int(each["version"]): each
            for each in found
            if each["name"] == MODEL and (every or each["state"] == "READY")
        }

    def _change(self, verb: str, **parameters: Any) -> tuple[int, Any]:
        """Ask for a change. Raises OSError or HTTPException if the node ends meanwhile."""
        return self._request(f"/v2/repository/models/{MODEL}/{verb}", {"parameters": parameters})

    def _request(self, path: str, body: Any) -> tuple[int, Any]:
        connection = http.client.HTTPConnection(self._node.admin, timeout=60)
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            reply = connection.getresponse()
            return reply.status, json.loads(reply.read())
        finally:
            connection.close()

    def _ask(
        self, version: str, keys: NDArray[np.int64], *, lookup: bool = False
    ) -> dict[str, NDArray[np.float32]]:
        """The outputs of a request with the same ``keys`` for both tables."""
        inputs = [
            {
                "name": name,
                "datatype": "INT64",
                "shape": [len(keys), 1],
                "parameters": {"binary_data_size": keys.nbytes},
            }
            for name in TABLES
        ]
        head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
        name = f"{MODEL}.lookup" if lookup else MODEL
        connection = http.client.HTTPConnection(self._node.address, timeout=60)
        connection.request(
            "POST",
            f"/v2/models/{name}{version}/infer",
            head + keys.tobytes() * len(TABLES),
            {"Inference-Header-Content-Length": str(len(head))},
        )
        reply = connection.getresponse()
        data = reply.read()
        connection.close()
        assert reply.status == 200, data[:500]
        at = int(reply.headers["Inference-Header-Content-Length"])
        outputs = {}
        for each in json.loads(data[:at])["outputs"]:
            size = each["parameters"]["binary_data_size"]
            outputs[each["name"]] = np.frombuffer(data[at : at + size], np.float32).reshape(
                each["shape"]
            )
            at += size
        return outputs


def publish_version(local: Path, number: int, uri: str) -> None:
    """Write a version into the repository ``local``, then publish it; the work of a process to kill."""
    from hps.config.repository_uri import RepositoryUri
    from hps.models.remote.opening import open_writable_store
    from hps.models.remote.publish import publish_remote
    from hps.models.repository import Repository
    from hps.types import NoProgress

    tables = {name: (np.arange(ROWS), rows_of(number, name)) for name in TABLES}
    write_version(local, SPEC, number, tables, dense=network(number), mapped=True)
    store = open_writable_store(RepositoryUri.parse(uri))
    publish_remote(Repository(local).open(MODEL, number), store, NoProgress())
