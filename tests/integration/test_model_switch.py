"""A version switch under load, with one process and several: no failed request, no mixed answer."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
from collections import Counter
from contextlib import ExitStack

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton

from benchmarks.peers.hps_server import start_hps
from benchmarks.peers.process import free_ports
from hps.config.model_schema import ModelSpec
from hps.models.version_writer import write_version
from hps.native import COMPILED
from hps.v1 import admin_pb2, lookup_pb2
from tests.support.small_models import RANKING, network, write_models
from tests.support.waiting import until

USERS, ITEMS = [3, 40, 99], [5, -7, 33]


RANKED = {
    "inputs": [
        {"name": "user", "datatype": "INT64", "shape": [3, 1], "data": USERS},
        {"name": "item", "datatype": "INT64", "shape": [3, 1], "data": ITEMS},
        {"name": "history", "datatype": "INT64", "shape": [3, 1], "data": ITEMS},
        {"name": "dense", "datatype": "FP32", "shape": [3, 3], "data": [0.25] * 9},
    ]
}


def write_second(root):
    """``clicks`` with other rows and another network."""

    def table(first, last, dim):
        keys = np.arange(first, last)
        return keys, -2 * keys[:, None] + np.arange(dim, dtype=np.float32)

    tables = {"users": table(0, 100, 4), "items": table(-50, 50, 2)}
    spec = ModelSpec.model_validate(RANKING)
    write_version(root, spec, 2, tables, dense=network(0.5))


class Server:
    def __init__(self, hps, grpc, grpc_admin, repository=None):
        self.hps, self.grpc, self.grpc_admin = hps, grpc, grpc_admin
        self.repository = repository

    def post(self, path, body=None, port=None):
        connection = http.client.HTTPConnection(port or self.hps.admin, timeout=60)
        connection.request("POST", path, json.dumps(body or {}))
        reply = connection.getresponse()
        found = json.loads(reply.read())
        connection.close()
        return reply.status, found

    def status(self):
        connection = http.client.HTTPConnection(self.hps.admin, timeout=60)
        connection.request("GET", "/v1/status")
        found = json.loads(connection.getresponse().read())
        connection.close()
        return found

    def load(self, model, version):
        parameters = {"parameters": {"version": version}}
        return self.post(f"/v2/repository/models/{model}/load", parameters)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("switch")
    write_models(folder / "models")
    port, admin = free_ports(2)
    limits = {"grpc": {"port": port, "admin": {"port": admin}}}
    with start_hps(folder, limits=limits, models={"rollback_s": 0}) as hps:
        write_second(folder / "models")
        yield Server(hps, f"127.0.0.1:{port}", f"127.0.0.1:{admin}", folder / "models")


class Asking:
    """Threads that send requests until they are stopped, and the answers."""

    def __init__(self, *asks):
        self.answers = [Counter() for _ in asks]
        self.failures = []
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=each)
            for each in zip(asks, self.answers, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, ask, answers):
        while not self._ended.is_set():
            try:
                answers[ask()] += 1
            except Exception as error:
                self.failures.append(error)
                return

    def more(self, n=10):
        """Wait until each has had ``n`` more answers."""
        before = [sum(each.values()) for each in self.answers]
        until(
            lambda: (
                self.failures
                or all(sum(a.values()) >= b + n for a, b in zip(self.answers, before, strict=True))
            )
        )

    def end(self):
        self._ended.set()
        for thread in self._threads:
            thread.join()


def by_rest(address, stack):
    connection = http.client.HTTPConnection(address, timeout=60)
    stack.callback(connection.close)

    def ask():
        connection.request("POST", "/v2/models/clicks/infer", json.dumps(RANKED))
        reply = connection.getresponse()
        found = json.loads(reply.read())
        assert reply.status == 200, found
        return found["model_version"], tuple(found["outputs"][1]["data"])

    return ask


def by_triton(address, stack):
    client = stack.enter_context(triton.InferenceServerClient(address))
    inputs = []
    for name, values in (("user", USERS), ("item", ITEMS), ("history", ITEMS)):
        inputs.append(triton.InferInput(name, [3, 1], "INT64"))
        inputs[-1].set_data_from_numpy(np.array(values).reshape(3, 1))
    inputs.append(triton.InferInput("dense", [3, 3], "FP32"))
    inputs[-1].set_data_from_numpy(np.full((3, 3), 0.25, np.float32))

    def ask():
        result = client.infer("clicks", inputs)
        version = result.get_response().model_version
        return version, tuple(result.as_numpy("logit").ravel().tolist())

    return ask


def by_lookup(channel):
    call = channel.unary_unary(
        "/hps.v1.Lookup/Lookup",
        lookup_pb2.LookupRequest.SerializeToString,
        lookup_pb2.LookupResponse.FromString,
    )
    given = {"user": USERS, "item": ITEMS}
    names = [lookup_pb2.Keys(name=name, count=len(keys)) for name, keys in given.items()]
    asked = lookup_pb2.Asked(model="clicks", names=names).SerializeToString()
    keys = np.concatenate([*given.values()]).tobytes()
    request = lookup_pb2.LookupRequest(asked=asked, keys=keys)

    def ask():
        answer = call(request, timeout=60)
        assert not answer.defaulted
        return str(answer.version), answer.vectors

    return ask


def test_switch_fails_no_request_and_mixes_no_answer(server):
    with grpc.insecure_channel(server.grpc) as channel, ExitStack() as stack:
        asking = Asking(
            by_rest(server.hps.address, stack),
            by_rest(server.hps.address, stack),
            by_triton(server.grpc, stack),
            by_lookup(channel),
        )
        for version in (2, 1, 2, 1):
            asking.more()
            assert server.load("clicks", version) == (
                200,
                {"name": "clicks", "version": str(version)},
            )
        asking.more()
        asking.end()
    assert not asking.failures
    for answers in asking.answers:
        # Of each version one answer, whatever way it was asked: rows and network are of one.
        assert sorted(version for version, _ in answers) == ["1", "2"]
    # Past requests do not keep replaced versions in memory.
    until(lambda: server.hps.log.read_text().count("is retired") == 4)


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """The same with two workers."""
    if not COMPILED:
        pytest.skip("a shared cache needs the native core")
    folder = tmp_path_factory.mktemp("workers")
    write_models(folder / "models")
    port, admin = free_ports(2)
    limits = {"workers": 2, "grpc": {"port": port, "admin": {"port": admin}}}
    # A machine that is busy with other tests must not make it serve defaults.
    rocksdb = {"path": str(folder / "rocksdb"), "guard": {"deadline_ms": 20_000}}
    tiers, models = {"rocksdb": rocksdb}, {"rollback_s": 0}
    with start_hps(folder, limits=limits, tiers=tiers, models=models) as hps:
        write_second(folder / "models")
        server = Server(hps, f"127.0.0.1:{port}", f"127.0.0.1:{admin}")
        until(lambda: server.status()["ready"])
        yield server


def test_workers_switch_without_failed_requests(several):
    with ExitStack() as stack:
        channels = [stack.enter_context(grpc.insecure_channel(several.grpc)) for _ in range(2)]
        asks = [by_rest(several.hps.address, stack) for _ in range(4)]
        asking = Asking(*asks, by_triton(several.grpc, stack), *map(by_lookup, channels))
        for version in (2, 1, 2, 1):
            asking.more()
            assert several.load("clicks", version)[0] == 200
            # From now on every worker answers with it.
            for _ in range(8):
                with ExitStack() as own:
                    assert by_rest(several.hps.address, own)()[0] == str(version)
        asking.more()
        asking.end()
    assert not asking.failures
    for answers in asking.answers:
        assert sorted(version for version, _ in answers) == ["1", "2"]
    until(lambda: several.hps.log.read_text().count("is retired") == 4)


def test_worker_started_during_a_load_has_the_version(several):
    def workers():
        found = several.status()["processes"]
        return [(each["pid"], each["state"]) for each in found if each["role"] == "worker"]

    def versions():
        found = set()
        for _ in range(12):  # connections are spread over the workers
            with ExitStack() as own:
                found.add(by_rest(several.hps.address, own)()[0])
        return found

    answered = []
    (first, _), (second, _) = workers()
    os.kill(first, signal.SIGSTOP)  # which holds the load up
    os.kill(
        second, signal.SIGKILL
    )  # if that is noticed during the load only, it waits all the same
    loading = threading.Thread(target=lambda: answered.append(several.load("clicks", 2)))
    loading.start()
    until(lambda: workers()[1][0] != second and workers()[1][1] == "ready")
    assert not answered
    os.kill(first, signal.SIGCONT)
    loading.join()
    assert answered == [(200, {"name": "clicks", "version": "2"})]
    assert versions() == {"2"}
    # And one that is started afterwards, though the settings state no version.
    os.kill(first, signal.SIGKILL)
    until(lambda: workers()[0][0] != first and several.status()["ready"])
    assert versions() == {"2"}
    assert several.load("clicks", 1)[0] == 200
    assert versions() == {"1"}


def test_models_are_listed_loaded_and_unloaded(server):
    listed = server.post("/v2/repository/index")[1]
    served = [each["name"] for each in listed if each["state"] == "READY"]
    assert served == ["clicks", "clicks.lookup", "words", "words.lookup"]
    assert server.post("/v2/repository/models/words/unload") == (200, {"name": "words"})
    body = {"inputs": [{"name": "word", "datatype": "INT64", "shape": [1, 1], "data": [3]}]}
    asked = "/v2/models/words/infer"
    status, told = server.post(asked, body, server.hps.address)
    assert (status, told["error"]) == (404, "Request for unknown model: 'words' is not found")
    listed = {each["name"]: each for each in server.post("/v2/repository/index")[1]}
    assert listed["words"] == {
        "name": "words",
        "version": "1",
        "state": "UNAVAILABLE",
        "reason": "unloaded",
    }
    with grpc.insecure_channel(server.grpc_admin) as channel:
        load = channel.unary_unary(
            "/hps.v1.Admin/LoadModel",
            admin_pb2.LoadModelRequest.SerializeToString,
            admin_pb2.LoadModelResponse.FromString,
        )
        assert load(admin_pb2.LoadModelRequest(model="words"), timeout=60).version == 1
    assert server.post(asked, body, server.hps.address)[0] == 200


class Files:
    """Files of a version, put back at the end."""

    def __init__(self, folder):
        self._folder = folder
        self._before = {}

    def change(self, name, changed):
        path = self._folder / name
        self._before.setdefault(path, path.read_bytes())
        path.write_bytes(changed(path.read_bytes()))

    def restore(self):
        for path, content in self._before.items():
            path.write_bytes(content)
        self._before.clear()


@pytest.fixture
def files(server):
    """Files of version 1 of ``clicks``, which is served."""
    assert server.load("clicks", 1)[0] == 200
    files = Files(server.repository / "clicks/1")
    yield files
    files.restore()


def noise(content):
    return bytes(len(content))


def refused(server, version, because):
    """Rejected over HTTP and gRPC, with a reason that has no path."""
    status, told = server.load("clicks", version)
    assert (status, because in told["error"]) == (409, True), told
    with grpc.insecure_channel(server.grpc_admin) as channel:
        load = channel.unary_unary(
            "/hps.v1.Admin/LoadModel", admin_pb2.LoadModelRequest.SerializeToString
        )
        with pytest.raises(grpc.RpcError) as error:
            load(admin_pb2.LoadModelRequest(model="clicks", version=version), timeout=60)
    assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    for text in (told["error"], error.value.details()):
        assert str(server.repository) not in text
        assert "/clicks/" not in text.replace("models.repository/clicks/", "")
    return True


@pytest.mark.parametrize(
    "name", ["dense.onnx", "tables/users/emb_vector", "tables/items/key", "manifest.json"]
)
def test_load_rejects_a_served_version_with_changed_files(server, files, name):
    """Rejected, and answered as before; when the old file is back, it is loaded again."""

    def scores():
        return server.post("/v2/models/clicks/infer", RANKED, server.hps.address)

    before = scores()
    assert before[0] == 200
    if name == "manifest.json":
        files.change(name, lambda content: content.replace(b'"rows": 100', b'"rows": 101', 1))
        assert refused(server, 1, "the manifest says 101 rows, found 100")
    else:
        files.change(name, noise)
        assert refused(server, 1, f"were changed after it was loaded: {name}")
    assert scores() == before
    files.restore()
    assert server.load("clicks", 1) == (200, {"name": "clicks", "version": "1"})


def test_load_rejects_a_network_that_differs_from_the_manifest(server, files):
    """Files of a version that is not served."""
    other = Files(server.repository / "clicks/2")
    for changed in (noise, lambda _: network(0.25)):
        other.change("dense.onnx", changed)
        try:
            assert refused(server, 2, "dense.onnx: the contents do not match the manifest")
        finally:
            other.restore()
    other.change("manifest.json", lambda content: content.replace(b'"version": 2', b'"version": 3'))
    assert refused(server, 2, "models.repository/clicks/2/manifest.json: describes model")
    other.restore()


def test_load_rejects_unknown_versions_and_the_wrong_port(server):
    status, told = server.load("clicks", 9)
    assert status == 404
    assert "model 'clicks' has no version 9 in the model repository" in told["error"]
    assert server.load("none", None)[0] == 404
    assert server.load("clicks", "x")[0] == 400
    status, told = server.post(
        "/v2/repository/models/clicks/load", {"parameters": {}}, server.hps.address
    )
    assert status == 501
    assert "use the admin port, or set models.control: all" in told["error"]
