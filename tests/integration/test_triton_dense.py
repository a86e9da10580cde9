"""Networks in a real Triton, by gRPC, HTTP and shared memory; and an unavailable Triton."""

from __future__ import annotations

import re
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.request import urlopen

import numpy as np
import psutil
import pytest

import hps
from benchmarks.peers.process import free_ports
from benchmarks.peers.triton import start_triton
from hps.config import configuration_from
from hps.config.server_settings import GrpcSettings, ServerSettings
from hps.dense.triton.grpc import GrpcTransport
from hps.dense.triton.http import HttpTransport
from hps.errors import DeadlineExceeded, DenseModelError, ModelError, Unavailable
from hps.models.repository import Repository
from hps.triton.export import MODEL_FILES, export_dense
from services.frontend.auth import Authorizer
from services.frontend.grpc.server import GrpcServer
from services.frontend.state import FrontendState
from tests.support.certificates import made
from tests.support.server_thread import Running
from tests.support.small_models import network
from tests.support.tls_relay import tls_relay
from tests.support.waiting import until

MODEL, TWO = "clicks", "two"
RNG = np.random.default_rng(3)


def request(batch):
    return {
        "features": {
            "user": RNG.integers(0, 110, (batch, 1)),
            "item": RNG.integers(-60, 60, (batch, 1)),
            "history": RNG.integers(-60, 60, (batch, 3)),
        },
        "dense": {"dense": RNG.standard_normal((batch, 3), dtype=np.float32)},
    }


@pytest.fixture(scope="module")
def exported(small_repository, tmp_path_factory):
    """A Triton repository with the network of ``clicks``."""
    folder = tmp_path_factory.mktemp("triton")
    export_dense(Repository(small_repository).open(MODEL), folder, "python")
    return folder


@pytest.fixture(scope="module")
def triton(exported, triton_ready, tmp_path_factory):
    """Has the network twice: alone, and as version 1 of ``TWO``, whose version 2 is another."""
    folder = tmp_path_factory.mktemp("versions")
    for name in (alone := f"{MODEL}.dense", TWO):
        shutil.copytree(exported / alone, folder / name)
    shutil.copytree(folder / TWO / "1", folder / TWO / "2")
    (folder / TWO / "2" / MODEL_FILES["python"]).write_bytes(network(2.0))
    config = folder / TWO / "config.pbtxt"
    config.write_text(config.read_text().replace(alone, TWO))
    with start_triton(folder) as server:
        yield server


@pytest.fixture
def opened(small_repository, tmp_path):
    """``opened(**triton)``: a node whose networks run in a Triton by these settings; None: here."""
    nodes = []

    def open_node(**triton):
        folder = tmp_path / str(len(nodes))
        settings = {
            "models": {"repository": str(small_repository)},
            "tiers": {"rocksdb": {"path": str(folder / "db")}},
            "dense": {"triton": {"timeout_ms": 60_000, **triton} if triton else None},
        }
        nodes.append(hps.open(settings))
        return nodes[-1]

    yield open_node
    for node in nodes:
        node.close()


def scores(node, asked):
    return node.predict(MODEL, asked["features"], asked["dense"]).outputs


WAYS = {
    "gRPC": lambda t: {"url": t.grpc},
    "HTTP": lambda t: {"url": t.address, "protocol": "http"},
    "gRPC and shared memory": lambda t: {"url": t.grpc, "shared_memory": "system"},
    "HTTP and shared memory": lambda t: {
        "url": t.address,
        "protocol": "http",
        "shared_memory": "system",
    },
}


@pytest.mark.parametrize("way", WAYS)
def test_scores_are_those_of_the_network_in_the_process(opened, triton, way):
    here, there = opened(), opened(**WAYS[way](triton))
    for batch in (0, 1, 5, 64):
        asked = request(batch)
        ours, theirs = scores(here, asked), scores(there, asked)
        assert ours.keys() == theirs.keys() == {"score", "logit"}
        for name, values in ours.items():
            np.testing.assert_allclose(theirs[name], values, atol=1e-6)
            assert theirs[name].dtype == values.dtype


@pytest.mark.parametrize("way", WAYS)
def test_many_threads(opened, triton, way):
    here, there = opened(), opened(**WAYS[way](triton))
    asked = [request(batch) for batch in RNG.integers(1, 60, 40)]
    expected = [scores(here, each)["score"] for each in asked]
    with ThreadPoolExecutor(6) as pool:
        got = list(pool.map(lambda each: scores(there, each)["score"], asked))
    for ours, theirs in zip(expected, got, strict=True):
        np.testing.assert_allclose(theirs, ours, atol=1e-6)


@pytest.mark.parametrize("way", ["gRPC", "HTTP"])
def test_behind_a_front_end(opened, triton, small_repository, way):
    """Rows at a lookup node, networks in Triton: the front end has neither."""
    here, state = opened(), FrontendState()
    state.serve(here)
    node = Running(GrpcServer(GrpcSettings(port=0), state, ServerSettings(), Authorizer()))
    settings = {
        "models": {"repository": str(small_repository)},
        "lookup": {"nodes": [node.server.url], "timeout_ms": 60_000},
        "dense": {"triton": {**WAYS[way](triton), "timeout_ms": 60_000}},
    }
    try:
        with hps.connect(settings, wait_s=60) as front:
            for batch in (0, 1, 5, 64):
                asked = request(batch)
                ours, theirs = scores(here, asked), scores(front, asked)
                assert ours.keys() == theirs.keys()
                for name, values in ours.items():
                    np.testing.assert_allclose(theirs[name], values, atol=1e-6)
    finally:
        node.stop(force=True)
        node.join()


@pytest.mark.parametrize("way", ["gRPC", "HTTP"])
def test_the_version_that_is_named_answers(opened, triton, way):
    def answer(**target):
        node = opened(**WAYS[way](triton), models={MODEL: {"name": TWO, **target}})
        return scores(node, asked)["logit"]

    asked = request(5)
    ours = scores(opened(), asked)["logit"]
    np.testing.assert_allclose(answer(version="1"), ours, atol=1e-4)
    np.testing.assert_allclose(answer(version="2"), -2 * ours, atol=1e-4)
    np.testing.assert_allclose(answer(), -2 * ours, atol=1e-4)  # Triton's choice is the latest


@pytest.fixture(scope="module")
def secured(triton, tmp_path_factory):
    """By protocol, where that Triton is spoken to over TLS; and the files of who may."""
    folder = tmp_path_factory.mktemp("certificates")
    ca, other = made(folder, "ca"), made(folder, "other")
    server = made(folder, "server", ["IP:127.0.0.1"], ca)
    key, certificate = made(folder, "client", (), ca)
    files = {"ca_file": ca[1], "certificate_file": certificate, "key_file": key}
    with (
        tls_relay(triton.address, server, ca) as http,
        tls_relay(triton.grpc, server, ca, "h2") as grpc,
    ):
        yield {"http": http, "grpc": grpc}, files, {"ca_file": other[1]}


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_over_tls(opened, secured, protocol):
    addresses, files, _ = secured
    asked = request(5)
    there = opened(url=addresses[protocol], protocol=protocol, tls=files)
    np.testing.assert_allclose(
        scores(there, asked)["score"], scores(opened(), asked)["score"], atol=1e-6
    )


@pytest.mark.parametrize("protocol", ["grpc", "http"])
@pytest.mark.parametrize("lacks", ["trust", "certificate", "TLS"])
def test_tls_that_is_not_agreed_on(opened, secured, protocol, lacks, caplog):
    addresses, files, stranger = secured
    tls = {"trust": files | stranger, "certificate": {"ca_file": files["ca_file"]}, "TLS": None}
    node = opened(url=addresses[protocol], protocol=protocol, tls=tls[lacks], retries=0)
    assert f"Triton at {addresses[protocol]} is unreachable" in caplog.text
    says = "(?i)certificate.verify" if lacks == "trust" else "is not available"
    with pytest.raises(Unavailable, match=says):
        scores(node, request(1))


def test_requests_take_turns_over_the_channels(opened, triton):
    node = opened(url=triton.grpc, channels=3)
    port = int(triton.grpc.rpartition(":")[2])

    def connected():
        there = psutil.Process().net_connections("tcp")
        return sum(c.status == "ESTABLISHED" and c.raddr.port == port for c in there)

    for _ in range(6):
        scores(node, request(1))
    until(lambda: connected() == 3)  # those of nodes that are closed go


def test_batches_beyond_tritons_own(opened, triton, monkeypatch):
    from hps.dense.triton import TritonModel

    here, there = opened(), opened(url=triton.grpc)
    network = there.models[MODEL].pipeline.dense
    assert isinstance(network, TritonModel)
    assert network._max_batch == 64
    network._max_batch = 7
    asked = request(40)
    np.testing.assert_allclose(
        scores(there, asked)["score"], scores(here, asked)["score"], atol=1e-6
    )


def test_a_model_that_triton_does_not_have(opened, triton):
    for protocol, url in (("grpc", triton.grpc), ("http", triton.address)):
        wrong = {MODEL: {"name": "elsewhere"}}
        with pytest.raises(ModelError, match=r"does not serve 'elsewhere'.*hps triton export"):
            opened(url=url, protocol=protocol, models=wrong)


def test_models_that_are_not_named_run_here(opened, triton):
    node = opened(url=triton.grpc, models={"other": {"name": "other"}})
    assert scores(node, request(2))["score"].shape == (2, 1)


def test_another_network_than_model_yaml_describes(small_repository, triton, tmp_path):
    settings = {
        "models": {
            "repository": str(small_repository),
            "serve": {MODEL: {"dense": {"outputs": [{"name": "none", "shape": [-1, 1]}]}}},
        },
        "tiers": {"rocksdb": {"path": str(tmp_path / "db")}},
        "dense": {"triton": {"url": triton.grpc}},
    }
    with pytest.raises(ModelError, match=r"model.yaml feeds nothing to network input 'dense'"):
        hps.open(settings)


def test_deadlines(opened, triton):
    node = opened(url=triton.grpc)
    served = node.models[MODEL]
    asked = request(3)
    rows = {t.name: np.zeros((3, *t.shape[1:]), t.dtype) for t in served.pipeline.dense.inputs}
    assert served.pipeline.dense.predict(rows)
    with pytest.raises(DeadlineExceeded):
        served.pipeline.dense.predict(rows, None, time.monotonic() - 1)
    assert scores(node, asked)


DROPS = """
  default_queue_policy {
    default_timeout_microseconds: 3600000000
    allow_timeout_override: true
  }
"""
SLOW = """
import time
from pathlib import Path
import triton_python_backend_utils as pb
class TritonPythonModel:
    def initialize(self, args):
        self.folder = Path(args["model_repository"])
    def execute(self, requests):
        (self.folder / "began").touch()
        while not (self.folder / "go").exists():
            time.sleep(0.01)
        return [pb.InferenceResponse([], pb.TritonError("ran")) for _ in requests]
"""


def test_triton_drops_runs_past_their_deadline(exported, triton_ready, tmp_path, monkeypatch):
    """If its configuration says so, by every protocol; its answer is then a deadline error."""
    folder = tmp_path / f"{MODEL}.dense"
    shutil.copytree(exported / folder.name, folder)
    (folder / "1/model.py").write_text(SLOW)
    config = folder / "config.pbtxt"
    before = config.read_text()
    config.write_text(before.replace("dynamic_batching {", "dynamic_batching {" + DROPS))
    assert config.read_text() != before

    def ask(transport):
        about = transport.describe(60)
        shapes = {tensor.name: (1, *tensor.shape[1:]) for tensor in about.inputs}
        inputs = [(t.name, t.datatype, np.zeros(shapes[t.name], t.dtype)) for t in about.inputs]
        transport.infer(inputs, ["score"], 60)

    with start_triton(tmp_path) as server, ThreadPoolExecutor(3) as pool:
        ways = (
            GrpcTransport(server.grpc, folder.name, "", channels=1),
            HttpTransport(server.address, folder.name, ""),
        )
        first = pool.submit(ask, ways[0])
        until((folder / "began").exists)
        for protocol in ("grpc", "http"):
            # Our deadline would pass with Triton's, before Triton has checked it.
            monkeypatch.setattr(f"hps.dense.triton.{protocol}.microseconds", lambda _: 1)
        waiting = [pool.submit(ask, way) for way in ways]

        def pending():
            page = urlopen(f"http://{server.metrics}/metrics", timeout=60).read().decode()
            return re.search(r"^nv_inference_pending_request_count.* 2$", page, re.MULTILINE)

        until(pending)
        (folder / "go").touch()
        with pytest.raises(DenseModelError, match="ran"):
            first.result(60)
        for late in waiting:
            with pytest.raises(DeadlineExceeded, match="in Triton's queue"):
                late.result(60)
        for way in ways:
            way.close()


def test_a_triton_that_comes_later_and_goes(opened, exported, triton_ready):
    ports = tuple(free_ports(3))
    node = opened(url=f"127.0.0.1:{ports[1]}", timeout_ms=5000, shared_memory="system")
    here = opened()
    asked = request(4)
    with pytest.raises(Unavailable, match=r"Triton at 127.0.0.1:.* is not available"):
        scores(node, asked)

    def answers():
        try:
            return scores(node, asked)
        except Unavailable:
            return None

    for _ in range(2):  # the second Triton does not know the memory shared with the first
        with start_triton(exported, ports):
            until(lambda: answers() is not None)
            np.testing.assert_allclose(
                scores(node, asked)["score"], scores(here, asked)["score"], atol=1e-6
            )
        assert answers() is None


def test_the_network_in_the_process_takes_over(opened, exported, triton_ready, caplog):
    caplog.set_level("INFO", "hps.dense.fallback")
    ports = tuple(free_ports(3))
    node = opened(url=f"127.0.0.1:{ports[1]}", fallback=True)
    asked = request(4)
    expected = scores(opened(), asked)["score"]
    np.testing.assert_array_equal(scores(node, asked)["score"], expected)
    assert "running dense.onnx in this process" in caplog.text
    stop, wrong = threading.Event(), []

    def ask():
        while not stop.is_set():
            if not np.allclose(scores(node, asked)["score"], expected, atol=1e-6):
                wrong.append("scores")

    fallbacks = node.metrics.counter("hps_dense_fallbacks_total", MODEL)
    with ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(ask) for _ in range(2)]
        with start_triton(exported, ports) as server:
            until(lambda: "runs the network again" in caplog.text)
            before = fallbacks.value
            server.process.kill()
            until(lambda: fallbacks.value > before)
        stop.set()
        for each in asking:
            each.result(60)
    assert not wrong


@pytest.mark.parametrize(
    ("triton", "error"),
    [
        ({"url": "http://x:1"}, "dense.triton.url: expected host:port without a scheme"),
        ({"url": "far:1", "shared_memory": "system"}, "is system, but far:1 is not this machine"),
        ({"url": "x:1", "tls": {"key_file": "k"}}, "must be set together with key_file"),
    ],
)
def test_wrong_settings(triton, error):
    from hps.errors import ConfigError

    with pytest.raises(ConfigError, match=error):
        configuration_from({"dense": {"triton": triton}})
