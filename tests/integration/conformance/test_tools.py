"""Programs against both servers: curl, KServe's client and perf_analyzer, unchanged; our own checks."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.peers.environments import ENVIRONMENTS
from benchmarks.peers.hps_server import start_hps
from benchmarks.peers.perf_analyzer import perf_analyzer
from hps.cli.conformance import app
from hps.config.dense_settings import TritonSettings, TritonTarget
from hps.models.repository import Repository
from hps.tools.conformance.http_wire import LENGTH, HttpProbe, request, tensors_of
from hps.tools.doctor.triton import triton as checks
from tests.support.certificates import made
from tests.support.small_models import write_models

CLIENT = Path(__file__).parents[2] / "support/kserve_client.py"
SERVERS = ("ours", "triton")


def answered(target, sample):
    with HttpProbe(target) as http:
        return http.send(sample).outputs()


def equal(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert np.array_equal(np.array(found[name], array.dtype).reshape(array.shape), array)


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("binary", [False, True])
def test_curl(target_of, program, tmp_path, server, binary):
    target = target_of(server)
    body, length = request(target.sample, binary=binary)
    sent, head = tmp_path / "body", tmp_path / "head"
    sent.write_bytes(body)
    command = [
        program("curl"),
        "--silent",
        "--fail",
        "--max-time",
        "30",
        "--dump-header",
        str(head),
    ]
    if length is not None:
        command += ["--header", f"{LENGTH}: {length}"]
    command += ["--data-binary", f"@{sent}"]
    url = f"http://{target.http}/v2/models/{target.sample.model}/infer"
    answer = subprocess.run([*command, url], capture_output=True, check=True).stdout
    headers = dict(
        line.lower().split(": ", 1) for line in head.read_text().splitlines() if ": " in line
    )
    start = int(headers.get(LENGTH.lower(), len(answer)))
    assert (start < len(answer)) is binary
    equal(tensors_of(json.loads(answer[:start]), answer[start:]), answered(target, target.sample))


def test_kserves_client(target_of, kserve_ready):
    targets = {server: target_of(server) for server in SERVERS}
    sample = targets["ours"].sample
    given = {
        "servers": {server: target.http for server, target in targets.items()},
        "request": {
            "model": sample.model,
            "inputs": {
                name: (sample.datatype(name), array.shape, array.reshape(-1).tolist())
                for name, array in sample.inputs.items()
            },
            "outputs": sample.outputs,
        },
    }
    done = subprocess.run(
        [ENVIRONMENTS["kserve"].python, CLIENT],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    assert answers["ours"]["health"] is True
    assert answers["triton"]["health"] is None  # its health has no body, which this client reads
    for server, answer in answers.items():
        expected = answered(targets[server], sample)
        for outputs in answer["outputs"]:
            equal(outputs, expected)


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_perf_analyzer(target_of, perf_analyzer_ready, server, protocol):
    """It compares every score with the one that the server gave before."""
    target = target_of(server)
    sample = target.sample
    scores = answered(target, sample)
    steps = [
        ({n: a[i] for n, a in sample.inputs.items()}, {n: a[i] for n, a in scores.items()})
        for i in range(len(sample.inputs["user"]))
    ]
    row = perf_analyzer(getattr(target, protocol), sample.model, steps, protocol=protocol)
    assert row["Inferences/Second"] > 10


@pytest.mark.parametrize("server", SERVERS)
def test_hps_conformance(target_of, server):
    """With generated requests. Triton's deviations are known, and reported with the reason."""
    target = target_of(server)
    done = CliRunner().invoke(app, [target.http, target.grpc, "--json"])
    found = {row["check"]: row for row in json.loads(done.stdout)}
    differs = [row for row in found.values() if row["verdict"] == "differs"]
    assert done.exit_code == 0, differs
    assert found["http: equivalent forms"]["verdict"] == "as it should"
    assert "http: load and unload" not in found
    if server == "ours":
        assert not any(row["verdict"] == "known" for row in found.values())
    else:
        assert found["grpc: reflection"]["verdict"] == "not offered"
        health = found["grpc: health service"]
        assert (health["verdict"], health["why"]) == (
            "known",
            ["it returns SERVING for any service; grpc.health.v1 requires NOT_FOUND"],
        )
        assert CliRunner().invoke(app, [f"grpc://{target.grpc}", "--strict"]).exit_code == 1


@pytest.mark.parametrize("server", SERVERS)
def test_hps_conformance_over_grpc_only(target_of, server):
    """It then lists models by gRPC."""
    address = f"grpc://{target_of(server).grpc}"
    done = CliRunner().invoke(app, [address, "--model", "clicks", "--json"])
    rows = json.loads(done.stdout)
    assert done.exit_code == 0, rows
    assert {row["check"].partition(":")[0] for row in rows} == {"grpc"}
    everything = CliRunner().invoke(app, [address])
    assert everything.exit_code == 0, everything.output
    assert "types, " in everything.stdout, "that of most tensors comes first"


def test_hps_conformance_with_a_key_and_certificates(tmp_path):
    """Every request carries the key and goes by certificates of both sides: without them the server answers
    none."""
    write_models(tmp_path / "models")
    ca = made(tmp_path, "root")
    key, certificate = made(tmp_path, "server", ["IP:127.0.0.1"], ca)
    mine = made(tmp_path, "checker", ca=ca)
    tls = {"certificate_file": str(certificate), "key_file": str(key), "client_ca_file": str(ca[1])}
    key = "conformance-checks-1"
    auth = {"mode": "api_key", "keys": [{"name": "checks", "role": "read", "key": key}]}
    with start_hps(tmp_path, auth=auth, tls=tls) as server:
        command = [f"https://{server.address}", f"grpcs://{server.grpc}", "--output", "json"]
        shown = f"ca={ca[1]},certificate={mine[1]},key={mine[0]}"
        done = CliRunner().invoke(app, [*command, "--api-key", key, "--tls", shown])
        assert done.exit_code == 0, done.stdout
        for lacks in (["--api-key", key, "--tls", f"ca={ca[1]}"], ["--tls", shown]):
            assert CliRunner().invoke(app, [*command, *lacks]).exit_code


def test_address_schemes_select_tls():
    plain, secured = ["http://x:1", "grpc://x:2"], ["https://x:1", "grpcs://x:2"]
    done = CliRunner().invoke(app, [*plain, "--tls", "ca=none.crt"])
    assert "write https://x:1" in str(done.exception)
    assert CliRunner().invoke(app, ["ftp://x:1", secured[1]]).exit_code == 2


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_hps_doctor_compares_triton_with_model_yaml(triton, home, protocol):
    url = triton.grpc if protocol == "grpc" else triton.address
    settings = TritonSettings.model_validate({"url": url, "protocol": protocol})
    clicks, types = (Repository(home / "models").open(name) for name in ("clicks", "types"))
    found = {check.name: check for check in checks(settings, [clicks, types])}
    assert {name: check.verdict for name, check in found.items()} == dict.fromkeys(
        ["Triton", "Triton: clicks", "Triton: types"], "OK"
    ), found
    assert found["Triton"].found.startswith("triton 2.")
    assert "is what model.yaml describes" in found["Triton: clicks"].found

    def told(**dense):
        spec = clicks.spec.model_copy(update={"dense": clicks.spec.dense.model_copy(update=dense)})
        _, check = checks(settings, [replace(clicks, spec=spec)])
        return check

    score = clicks.spec.dense.outputs[0]
    wide = told(outputs=[score.model_copy(update={"shape": (-1, 2)})])
    assert wide.verdict == "FAIL"
    assert "'score' has shape [-1, 2] in model.yaml, [-1, 1] in Triton's model" in wide.found
    renamed = told(outputs=[score.model_copy(update={"name": "ctr"})])
    assert "output 'ctr'" in renamed.found
    assert "triton export" in renamed.remedy
    pinned = settings.model_copy(
        update={"models": {"clicks": TritonTarget(name="clicks.dense", version="7")}}
    )
    _, other = checks(pinned, [clicks])
    assert (other.verdict, "clicks.dense version 7" in other.found) == ("FAIL", True)
