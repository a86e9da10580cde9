"""Several versions of a model at a real server: by REST and gRPC, with workers, front ends and kill -9."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from benchmarks.peers.hps_server import start_hps
from benchmarks.peers.process import free_ports
from hps.config.model_schema import ModelSpec
from hps.models.version_writer import write_version
from hps.native import COMPILED
from hps.v1 import admin_pb2, lookup_pb2
from tests.integration.test_model_switch import Asking, Server
from tests.support.waiting import until

SPEC = {
    "name": "words",
    "tables": [{"name": "left", "dim": 4}, {"name": "right", "dim": 2}],
    "features": [{"name": "left", "table": "left", "hotness": 1},
                 {"name": "right", "table": "right", "hotness": 1}],
}  # fmt: skip
ROWS = 200
KEYS = [3, 40, 99]


def write(root, *versions):
    """Every number of version ``v`` is ``v``."""
    for version in versions:
        tables = {
            table["name"]: (
                np.arange(ROWS),
                np.full((ROWS, table["dim"]), version, np.float32),
            )
            for table in SPEC["tables"]
        }
        write_version(root, ModelSpec.model_validate(SPEC), version, tables)


@contextmanager
def serving(folder, versions=(1, 2, 3), **settings):
    write(folder / "models", *versions)
    port, admin = free_ports(2)
    limits = {"grpc": {"port": port, "admin": {"port": admin}}, **settings.pop("limits", {})}
    models = {"versions": {"latest": 2}, "control": "all", **settings.pop("models", {})}
    with start_hps(folder, limits=limits, models=models, **settings) as hps:
        server = Server(hps, f"127.0.0.1:{port}", f"127.0.0.1:{admin}", folder / "models")
        until(lambda: server.status()["ready"])
        yield server


@pytest.fixture
def server(tmp_path):
    with serving(tmp_path) as one:
        yield one


@pytest.fixture(params=[0, 2])
def any_server(request, tmp_path):
    """Without workers, and with two."""
    if request.param and not COMPILED:
        pytest.skip("a shared cache needs the native core")
    with serving(tmp_path, limits={"workers": request.param}) as one:
        yield one


def change(server, verb, **parameters):
    path = f"/v2/repository/models/words/{verb}"
    status, answer = server.post(path, {"parameters": parameters})
    return status, answer.get("error") or answer.get("version")


def by_rest(server, version=""):
    """The answered version; the rows of both tables must be of it."""
    data = {"shape": [3, 1], "datatype": "INT64", "data": KEYS}
    inputs = [{"name": name, **data} for name in ("left", "right")]
    path = f"/v2/models/words.lookup{'/versions/' + version if version else ''}/infer"
    status, answer = server.post(path, {"inputs": inputs}, server.hps.address)
    if status != 200:
        return status, answer["error"]
    (row,) = {value for output in answer["outputs"] for value in output["data"]}
    assert str(int(row)) == answer["model_version"]
    return int(row)


def by_grpc(client, version=""):
    inputs = []
    for name in ("left", "right"):
        inputs.append(triton.InferInput(name, [3, 1], "INT64"))
        inputs[-1].set_data_from_numpy(np.array(KEYS).reshape(3, 1))
    result = client.infer("words.lookup", inputs, model_version=version)
    (row,) = {float(v) for name in ("left", "right") for v in result.as_numpy(name).ravel()}
    assert str(int(row)) == result.get_response().model_version
    return int(row)


def by_lookup(channel, **asked):
    call = channel.unary_unary(
        "/hps.v1.Lookup/Lookup",
        lookup_pb2.LookupRequest.SerializeToString,
        lookup_pb2.LookupResponse.FromString,
    )
    names = [lookup_pb2.Keys(name=name, count=3) for name in ("left", "right")]
    message = lookup_pb2.Asked(model="words", names=names, **asked).SerializeToString()
    answer = call(
        lookup_pb2.LookupRequest(asked=message, keys=np.array(KEYS * 2).tobytes()), timeout=60
    )
    (row,) = {*np.frombuffer(answer.vectors, np.float32).tolist()}
    assert row == answer.version
    return int(row)


def test_requests_of_all_protocols_choose_versions(any_server):
    server = any_server
    assert change(server, "load", version=1, beside=True, labels=["stable"]) == (200, "1")
    assert change(server, "label", label="canary", version=2)[0] == 200
    expected = {"": 3, "1": 1, "2": 2, "3": 3, "stable": 1, "canary": 2, "latest": 3}
    with ExitStack() as stack:
        client = stack.enter_context(triton.InferenceServerClient(server.grpc))
        channel = stack.enter_context(grpc.insecure_channel(server.grpc))
        assert {each: by_rest(server, each) for each in expected} == expected
        assert {each: by_grpc(client, each) for each in expected} == expected
        assert by_lookup(channel) == 3
        assert [by_lookup(channel, version=n) for n in (1, 2, 3)] == [1, 2, 3]
        assert by_lookup(channel, label="stable") == 1
        known = "versions 1, 2, 3 are served; labels: canary (2), stable (1)"
        status, error = by_rest(server, "beta")
        assert (status, known in error) == (404, True)
        with pytest.raises(InferenceServerException, match="version 9 is not found") as raised:
            by_grpc(client, "9")
        assert known in str(raised.value)
        with pytest.raises(grpc.RpcError) as failed:
            by_lookup(channel, label="beta")
        assert failed.value.code() is grpc.StatusCode.NOT_FOUND
        assert client.get_model_metadata("words").versions == ["1", "2", "3"]
        assert client.is_model_ready("words", "canary")
        assert not client.is_model_ready("words", "9")
        statistics = client.get_inference_statistics("words.lookup").model_stats
        assert [each.version for each in statistics] == ["1", "2", "3"]
        one = client.get_inference_statistics("words.lookup", "stable").model_stats
        assert [each.version for each in one] == ["1"]
        config = client.get_model_config("words").config
        assert config.version_policy.latest.num_versions == 2
    index = server.post("/v2/repository/index")[1]
    assert [
        (each["version"], each["state"], each["current"], each["labels"])
        for each in index
        if each["name"] == "words"
    ] == [
        ("1", "READY", False, ["stable"]),
        ("2", "READY", False, ["canary"]),
        ("3", "READY", True, []),
    ]


def test_switches_under_load_fail_no_request_and_mix_no_versions(any_server):
    server = any_server
    with ExitStack() as stack:
        client = stack.enter_context(triton.InferenceServerClient(server.grpc))
        channel = stack.enter_context(grpc.insecure_channel(server.grpc))
        asking = Asking(
            lambda: by_rest(server),
            lambda: by_grpc(client),
            lambda: by_lookup(channel),
            lambda: by_rest(server, "2"),
        )
        for verb, parameters, version in (
            ("switch", {"version": 2}, 2),
            ("rollback", {}, 3),
            ("load", {"version": 1}, 1),
            ("switch", {"version": "latest"}, 3),
        ):
            asking.more(5)
            assert change(server, verb, **parameters) == (200, str(version))
            # From now on every process answers with it.
            assert {by_rest(server) for _ in range(6)} == {version}
        asking.more(5)
        asking.end()
    assert not asking.failures
    *current, pinned = asking.answers
    assert all({*answers} <= {1, 2, 3} for answers in current)
    assert {*pinned} == {2}


def test_changes_are_checked(server):
    assert change(server, "switch", version="beta")[0] == 404
    assert change(server, "switch")[0] == 400
    assert change(server, "label", label="latest", version=3)[0] == 400
    assert change(server, "label", label=7, version=3)[0] == 400
    assert change(server, "label", label="stable", version=9)[0] == 404
    assert change(server, "load", version=1, beside="yes")[0] == 400
    assert change(server, "load", version=1, labels=[1])[0] == 400
    status, error = change(server, "rollback")
    assert (status, error) == (404, "model 'words' has no previous version to roll back to")
    status, error = change(server, "unload", version=3)
    assert (status, "is the current one of model 'words'" in error) == (400, True)
    assert by_rest(server) == 3
    with grpc.insecure_channel(server.grpc_admin) as channel:
        for name, message in (
            ("Label", admin_pb2.LabelModelRequest(model="words", label="stable", version="2")),
            ("Switch", admin_pb2.SwitchModelRequest(model="words", version="stable")),
            ("Rollback", admin_pb2.RollbackModelRequest(model="words")),
        ):
            call = channel.unary_unary(
                f"/hps.v1.Admin/{name}Model",
                type(message).SerializeToString,
                admin_pb2.SwitchModelResponse.FromString,
            )
            call(message, timeout=60)
    assert by_rest(server) == 3
    assert by_rest(server, "stable") == 2
    with triton.InferenceServerClient(server.grpc) as client:  # models.control: all
        client.load_model("words")
        client.unload_model("words")
    assert by_rest(server)[0] == 404


def hps(server, *arguments):
    command = [str(Path(sys.executable).with_name("hps")), "model", *arguments]
    command += ["--server", f"http://{server.hps.admin}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_commands_change_what_is_served(server):
    done = hps(server, "load", "words", "--version", "1", "--beside", "--label", "stable")
    assert (done.stderr, done.returncode, done.stdout) == (
        "",
        0,
        "words version 1 is served beside the current version.\n",
    )
    assert hps(server, "switch", "words", "stable").returncode == 0
    assert by_rest(server) == 1
    assert hps(server, "rollback", "words").stdout == "words version 3 is the current version.\n"
    assert hps(server, "label", "words", "stable", "2").returncode == 0
    assert by_rest(server, "stable") == 2
    listed = json.loads(hps(server, "list", "words", "--output", "json").stdout)
    assert {each["version"]: each["labels"] for each in listed} == {
        "1": [],
        "2": ["stable"],
        "3": [],
    }
    assert hps(server, "label", "words", "stable").returncode != 0
    assert hps(server, "label", "words", "stable", "--remove").returncode == 0
    unknown = hps(server, "switch", "words", "stable")
    assert unknown.returncode != 0
    assert "versions 1, 2, 3 are served" in unknown.stderr
    assert hps(server, "unload", "words").returncode == 0
    assert by_rest(server)[0] == 404


def test_kill_in_the_middle_of_switches_leaves_one_whole_version(tmp_path):
    """Whatever moment it is, the restarted node serves a version that was current, and the label."""
    write(tmp_path / "models", 1, 2, 3)
    served = {3}
    for attempt in range(4):
        with serving(tmp_path, versions=()) as server:
            assert by_rest(server) in served
            if attempt:
                assert by_rest(server, "stable") == 1
            else:
                assert change(server, "load", version=1, beside=True, labels=["stable"])[0] == 200
            ended = threading.Event()

            def switch(server=server, ended=ended):
                for version in (2, 3, 2, 3, 2, 3) * 50:
                    if ended.is_set():
                        return
                    try:
                        change(server, "load", version=version)
                    except (OSError, ValueError):
                        return

            thread = threading.Thread(target=switch)
            thread.start()
            time.sleep(0.15 + 0.11 * attempt)
            os.kill(server.status()["processes"][0]["pid"], signal.SIGKILL)
            ended.set()
            thread.join()
        served = {2, 3}


def test_watched_repository_switches_all_processes(tmp_path):
    limits = {"workers": 2} if COMPILED else {}
    with serving(tmp_path, models={"watch_s": 0.1}, limits=limits) as server:
        write(tmp_path / "models", 4)
        until(lambda: by_rest(server) == 4)
        until(lambda: {by_rest(server) for _ in range(8)} == {4})
        assert by_rest(server, "3") == 3


@contextmanager
def front_end(folder):
    """A lookup node, and a front end that serves its version 3."""
    with serving(folder, limits={"role": "lookup"}) as node:
        (folder / "front" / "models").mkdir(parents=True)
        os.symlink(folder / "models" / "words", folder / "front" / "models" / "words")
        with start_hps(
            folder / "front",
            limits={"role": "frontend"},
            tiers={"rocksdb": {"enabled": True}},
            lookup={"nodes": [node.grpc]},
        ) as hps:
            front = Server(hps, None, None)
            until(lambda: by_rest(front) == 3)
            yield node, front


def test_front_ends_serve_the_versions_of_their_lookup_nodes(tmp_path):
    with front_end(tmp_path) as (node, front):
        assert by_rest(front, "2") == 2
        assert change(node, "load", version=1, beside=True, labels=["stable"])[0] == 200
        until(lambda: by_rest(front, "stable") == 1)
        assert change(node, "switch", version="stable") == (200, "1")
        until(lambda: by_rest(front) == 1)
        assert change(node, "rollback") == (200, "3")
        until(lambda: by_rest(front) == 3)


def warm_ups(server):
    with urllib.request.urlopen(f"http://{server.hps.admin}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    name = 'hps_model_warm_ups_total{model="words",result="settled"} '
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def ask_for(seconds, server):
    """The answered versions."""
    until_s, answered = time.monotonic() + seconds, set()
    while time.monotonic() < until_s:
        answered.add(by_rest(server))
    return answered


def test_workers_warm_up_a_version_with_their_own_requests(any_server):
    server = any_server
    assert ask_for(1.0, server) == {3}
    assert change(server, "load", version=1) == (200, "1")
    until(lambda: warm_ups(server) >= 1)


def test_front_ends_warm_up_a_newer_version_before_they_serve_it(tmp_path):
    """A rollback is immediate."""
    with front_end(tmp_path) as (node, front):
        assert ask_for(1.0, front) == {3}
        write(tmp_path / "models", 4)
        assert change(node, "load", version=4) == (200, "4")
        until(lambda: by_rest(front) == 4)
        assert warm_ups(front) == 1
        assert change(node, "rollback") == (200, "3")
        until(lambda: by_rest(front) == 3)
        assert warm_ups(front) == 1
