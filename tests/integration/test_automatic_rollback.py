"""Automatic rollback at a real server: networks that fail, are slow, or score differently; and a good one."""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import threading
import time
import urllib.request
from contextlib import contextmanager

import numpy as np
import pytest

from benchmarks.peers.hps_server import start_hps
from benchmarks.peers.process import free_ports
from hps.config.model_schema import ModelSpec
from hps.models.version_writer import write_version
from hps.native import COMPILED
from hps.observability import metric_names as m
from hps.observability.metric_traffic import ROLLBACK_REASONS
from tests.integration.test_model_switch import Server
from tests.support.network_variants import variant
from tests.support.small_models import RANKING
from tests.support.waiting import until

KINDS = {1: "same", 2: "failing", 3: "slow", 4: "shifted", 5: "same"}
REASONS = {2: "errors", 3: "latency", 4: "scores"}
# The machine may be busy: slow is some ten times as slow.
BOUNDS = {"watch_s": 60, "min_requests": 50, "max_p99_ratio": 3}
NO_LATENCY = BOUNDS | {"max_p99_ratio": None}


def tables():
    def table(first, last, dim):
        keys = np.arange(first, last)
        return keys, keys[:, None] + np.arange(dim, dtype=np.float32) / 8

    return {"users": table(0, 100, 4), "items": table(-50, 50, 2)}


def write(root):
    spec = ModelSpec.model_validate(RANKING)
    for version, kind in KINDS.items():
        write_version(root, spec, version, tables(), dense=variant(kind))


def request(batch=3):
    def keys(low, high, *shape):
        size = int(np.prod(shape))
        return [random.randrange(low, high) for _ in range(size)]

    return {
        "inputs": [
            {"name": "user", "datatype": "INT64", "shape": [1, 1], "data": keys(0, 100, 1)},
            {
                "name": "item",
                "datatype": "INT64",
                "shape": [batch, 1],
                "data": keys(-50, 50, batch),
            },
            {
                "name": "history",
                "datatype": "INT64",
                "shape": [batch, 1],
                "data": keys(-50, 50, batch),
            },
            {"name": "dense", "datatype": "FP32", "shape": [batch, 3], "data": [0.5] * 3 * batch},
        ]
    }


class Clients:
    """Threads that send requests with four samples or, if ``odd``, three."""

    def __init__(self, server, threads=2):
        self.odd = False
        self.statuses, self.versions = [], []
        self._server, self._ended = server, threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def _run(self):
        connection = http.client.HTTPConnection(self._server.hps.address, timeout=60)
        while not self._ended.is_set():
            body = request(3 if self.odd else 4)
            connection.request("POST", "/v2/models/clicks/infer", json.dumps(body))
            reply = connection.getresponse()
            answer = json.loads(reply.read())
            self.statuses.append(reply.status)
            if reply.status == 200:
                self.versions.append(int(answer["model_version"]))
        connection.close()

    def more(self, number):
        seen = len(self.versions)
        until(lambda: len(self.versions) >= seen + number, timeout_s=60)

    def close(self):
        self._ended.set()
        for thread in self._threads:
            thread.join()


@contextmanager
def serving(folder, workers):
    if not (folder / "models").exists():
        write(folder / "models")
    models = {"serve": {"clicks": {"version": 1}}}
    with start_hps(folder, limits={"workers": workers}, models=models) as hps:
        server = Server(hps, None, None, folder / "models")
        clients = Clients(server)
        try:
            yield server, clients
        finally:
            clients.close()


@pytest.fixture(params=[0, 2])
def served(request, tmp_path):
    """Without workers, and with two."""
    if request.param and not COMPILED:
        pytest.skip("a shared cache needs the native core")
    with serving(tmp_path, request.param) as both:
        yield both


def post(server, verb, **parameters):
    path = f"/v2/repository/models/clicks/{verb}"
    status, answer = server.post(path, {"parameters": parameters})
    assert status == 200, answer
    return answer


def listed(server):
    index = server.post("/v2/repository/index")[1]
    return {each["version"]: each for each in index if each["name"] == "clicks"}


def counted_rollbacks(server):
    """Automatic rollbacks of this process by reason."""
    with urllib.request.urlopen(f"http://{server.hps.admin}/metrics") as reply:
        found = re.findall(
            m.MODEL_AUTOMATIC_ROLLBACKS + r"{.*?reason=\"(.*?)\"} (\d+)", reply.read().decode()
        )
    return {reason: int(count) for reason, count in found}


def rolled_back(server, version):
    time.sleep(0.1)
    return listed(server)[str(version)].get("reason", "") not in ("", "unloaded")


@pytest.mark.parametrize("version", REASONS)
def test_a_bad_canary_loses_its_share(served, version):
    server, clients = served
    post(server, "load", version=version, beside=True)
    clients.odd = True
    bounds = BOUNDS if REASONS[version] == "latency" else NO_LATENCY
    post(server, "traffic", weights={str(version): 40}, rollback=bounds)
    until(lambda: rolled_back(server, version), timeout_s=60)
    assert listed(server)["1"]["weight"] == 100
    clients.versions.clear()
    clients.more(300)
    assert {*clients.versions[-100:]} == {1}
    log = server.hps.log.read_text()
    assert f"version {version} rolled back automatically, version 1 answers its requests" in log
    assert counted_rollbacks(server) == {
        reason: int(reason == REASONS[version]) for reason in ROLLBACK_REASONS
    }


def test_a_bad_switch_goes_back(served):
    server, clients = served
    post(server, "traffic", rollback=NO_LATENCY)
    clients.more(400)
    post(server, "load", version=4)
    until(lambda: rolled_back(server, 4), timeout_s=60)
    note = listed(server)["4"]
    assert "population stability index" in note["reason"]
    until(lambda: listed(server)["1"]["current"])
    clients.versions.clear()
    clients.more(300)
    assert {*clients.versions[-100:]} == {1}
    post(server, "load", version=4)  # the operator insists: it is watched again
    until(lambda: listed(server)["1"]["current"], timeout_s=60)


def test_a_bad_switch_goes_back_after_a_restart(tmp_path):
    with serving(tmp_path, 0) as (server, clients):
        post(server, "traffic", rollback=BOUNDS)
        post(server, "load", version=2)
        clients.more(10)
        assert listed(server)["2"]["current"]
    with serving(tmp_path, 0) as (server, clients):
        assert listed(server)["2"]["current"]
        clients.odd = True
        until(lambda: rolled_back(server, 2), timeout_s=60)
        assert listed(server)["1"]["current"]
        assert counted_rollbacks(server)["errors"] == 1


def test_a_good_version_stays(tmp_path):
    with serving(tmp_path, 0) as (server, clients):
        post(server, "load", version=5, beside=True)
        post(server, "traffic", weights={"5": 50}, rollback=BOUNDS)
        clients.more(1000)
        assert listed(server)["5"]["weight"] == 50
        post(server, "switch", version=5)
        clients.more(1000)
        assert listed(server)["5"]["current"]
        assert not rolled_back(server, 5)


def test_front_ends_follow_rules_and_withdraw_by_themselves(tmp_path):
    """The network runs in the front end, so only that one sees that it fails."""
    write(tmp_path / "models")
    (port,) = free_ports(1)
    models = {"serve": {"clicks": {"version": 1}}}
    limits = {"role": "lookup", "grpc": {"port": port}}
    with start_hps(tmp_path, limits=limits, models=models) as node_process:
        node = Server(node_process, None, None)
        (tmp_path / "front").mkdir()
        os.symlink(tmp_path / "models", tmp_path / "front" / "models")
        with start_hps(
            tmp_path / "front", limits={"role": "frontend"}, lookup={"nodes": [f"127.0.0.1:{port}"]}
        ) as hps:
            front = Server(hps, None, None)
            until(lambda: front.status()["ready"])
            post(node, "load", version=5, beside=True)
            post(node, "load", version=2, beside=True)
            post(node, "traffic", weights={"5": 50, "2": 20}, rollback=BOUNDS)
            until(lambda: listed(front).get("2", {}).get("weight") == 20)
            # an alert would miss the first increment of a new counter
            assert counted_rollbacks(front) == dict.fromkeys(ROLLBACK_REASONS, 0)
            clients = Clients(front)
            clients.odd = True
            try:
                until(lambda: rolled_back(front, 2), timeout_s=60)
                clients.statuses.clear()
                clients.versions.clear()
                clients.more(300)
                assert {*clients.versions} == {1, 5}
                assert {*clients.statuses[20:]} == {200}
            finally:
                clients.close()
            assert {v: each["weight"] for v, each in listed(front).items()} == {
                "1": 50,
                "5": 50,
                "2": 0,
            }
            assert listed(node)["2"]["weight"] == 20  # other front ends decide for themselves
            post(node, "traffic", weights={"2": 10})  # a changed rule counts again
            until(lambda: listed(front)["2"]["weight"] == 10)
