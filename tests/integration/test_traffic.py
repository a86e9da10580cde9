"""Traffic rules at a real server: by REST, gRPC and ``hps.v1``, with workers, front ends and kill -9."""

from __future__ import annotations

import http.client
import json
import os
import signal
from collections import Counter
from contextlib import ExitStack, closing
from functools import partial

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from google.protobuf.struct_pb2 import Struct

from hps.native import COMPILED
from hps.v1 import admin_pb2, lookup_pb2
from tests.integration.test_model_versions import change, hps, serving
from tests.support.waiting import until

USER = "x-user-id"
USERS = range(40)


@pytest.fixture(params=[0, 2])
def any_server(request, tmp_path):
    """Without workers, and with two."""
    if request.param and not COMPILED:
        pytest.skip("a shared cache needs the native core")
    with serving(tmp_path, limits={"workers": request.param}) as one:
        yield one


@pytest.fixture
def server(tmp_path):
    with serving(tmp_path) as one:
        yield one


def traffic(server, **rule):
    status, answer = server.post("/v2/repository/models/words/traffic", {"parameters": rule})
    return status, answer.get("error") or answer


class Rest:
    """Requests over one connection to one process; each returns the version of its rows."""

    def __init__(self, server):
        self._connection = http.client.HTTPConnection(server.hps.address, timeout=60)

    def __call__(self, key=3, name="words", headers=None, parameters=None):
        data = {"shape": [1, 1], "datatype": "INT64", "data": [key]}
        inputs = [{"name": each, **data} for each in ("left", "right")]
        body = {"inputs": inputs} | ({"parameters": parameters} if parameters else {})
        path = f"/v2/models/{name}/infer"
        self._connection.request("POST", path, json.dumps(body), headers or {})
        answer = json.loads(self._connection.getresponse().read())
        if "outputs" not in answer:
            return answer["error"]
        (row,) = {value for output in answer["outputs"] for value in output["data"]}
        assert str(int(row)) == answer["model_version"]
        return int(row)

    def close(self):
        self._connection.close()


def by_grpc(client, key=3, headers=None, parameters=None):
    inputs = []
    for name in ("left", "right"):
        inputs.append(triton.InferInput(name, [1, 1], "INT64"))
        inputs[-1].set_data_from_numpy(np.array([[key]]))
    result = client.infer("words", inputs, headers=headers, parameters=parameters)
    (row,) = {float(v) for name in ("left", "right") for v in result.as_numpy(name).ravel()}
    assert str(int(row)) == result.get_response().model_version
    return int(row)


def by_lookup(channel, key=3, headers=None, **asked):
    call = channel.unary_unary(
        "/hps.v1.Lookup/Lookup",
        lookup_pb2.LookupRequest.SerializeToString,
        lookup_pb2.LookupResponse.FromString,
    )
    names = [lookup_pb2.Keys(name=name, count=1) for name in ("left", "right")]
    message = lookup_pb2.Asked(model="words", names=names, **asked).SerializeToString()
    request = lookup_pb2.LookupRequest(asked=message, keys=np.array([key, key]).tobytes())
    answer = call(request, timeout=60, metadata=list((headers or {}).items()))
    (row,) = {*np.frombuffer(answer.vectors, np.float32).tolist()}
    assert row == answer.version
    return int(row)


@pytest.fixture
def asks(any_server):
    """Each kind of request, over several connections, so that all workers answer."""
    with ExitStack() as stack:
        found = []
        for _ in range(3):
            rest, lookups = (stack.enter_context(closing(Rest(any_server))) for _ in range(2))
            client = stack.enter_context(
                triton.InferenceServerClient(any_server.grpc, channel_args=ALONE)
            )
            channel = stack.enter_context(grpc.insecure_channel(any_server.grpc, ALONE))
            found += [
                rest,
                partial(lookups, name="words.lookup"),
                partial(by_grpc, client),
                partial(by_lookup, channel),
            ]
        yield found


ALONE = [("grpc.use_local_subchannel_pool", 1)]


def test_shares_are_those_of_the_weights(any_server, asks):
    assert traffic(any_server, weights={"2": 30})[0] == 200
    for ask in asks[:4]:
        counts = Counter(ask() for _ in range(200))
        assert counts.keys() == {2, 3}
        assert 30 <= counts[2] <= 92  # 60, and five standard deviations
    assert traffic(any_server) == (
        200,
        {
            "name": "words",
            "rule": {},
            "versions": [
                {"version": "2", "weight": 0.0, "reason": ""},
                {"version": "3", "weight": 100.0, "reason": ""},
            ],
        },
    )
    assert {ask() for ask in asks for _ in range(3)} == {3}


def test_one_user_gets_one_version_of_every_process_and_protocol(any_server, asks):
    assert traffic(any_server, weights={"2": 50}, sticky=f"header:{USER}")[0] == 200
    found = {user: {ask(headers={USER: f"u{user}"}) for ask in asks} for user in USERS}
    assert all(len(each) == 1 for each in found.values())
    assert {version for each in found.values() for version in each} == {2, 3}
    assert traffic(any_server, weights={"2": 50}, sticky="input:left")[0] == 200
    found = {key: {ask(key) for ask in asks} for key in USERS}
    assert all(len(each) == 1 for each in found.values())
    assert {version for each in found.values() for version in each} == {2, 3}


def test_parameters_and_headers_choose_versions(any_server, asks):
    assert change(any_server, "label", label="canary", version=2)[0] == 200
    rule = [
        {"by": "parameter:group", "value": "b", "version": "canary"},
        {"by": "header:x-group", "value": "b", "version": "canary"},
    ]
    assert traffic(any_server, matches=rule)[0] == 200
    for ask in (asks[0], asks[2]):
        assert {ask(parameters={"group": group}) for group in ("a", "c")} == {3}
        assert {ask(parameters={"group": "b"}) for _ in range(5)} == {2}
    for ask in asks:
        assert {ask(headers={"x-group": "b"}) for _ in range(3)} == {2}
        assert {ask(headers={"x-group": "a"}) for _ in range(3)} == {3}
        assert ask() == 3
    with grpc.insecure_channel(any_server.grpc) as channel:
        assert by_lookup(channel, headers={"x-group": "b"}, version=3) == 3


def test_rules_survive_kill_and_users_keep_their_version(tmp_path):
    with serving(tmp_path) as server:
        assert change(server, "load", version=1, beside=True, labels=["canary"])[0] == 200
        rule = {"weights": {"canary": 50.0}, "sticky": f"header:{USER}"}
        assert traffic(server, **rule)[0] == 200
        with closing(Rest(server)) as rest:
            before = {user: rest(headers={USER: str(user)}) for user in USERS}
        os.kill(server.status()["processes"][0]["pid"], signal.SIGKILL)
    with serving(tmp_path, versions=()) as server:
        with closing(Rest(server)) as rest:
            assert {user: rest(headers={USER: str(user)}) for user in USERS} == before
        _, answer = server.post("/v2/repository/index")
        assert {
            (each["version"], each["weight"]) for each in answer if each["name"] == "words"
        } == {("1", 50.0), ("2", 0.0), ("3", 50.0)}


def test_rules_are_checked(server):
    for rule, message in (
        ({"weights": {"9": 10}}, "the traffic rule names '9'"),
        ({"weights": {"beta": 10}}, "versions 2, 3 are served"),
        ({"weights": {"2": 0}}, "it must be above 0"),
        ({"sticky": "user"}, "sticky: expected text that matches"),
        ({"weight": {"2": 1}}, "weight: unknown key; did you mean 'weights'"),
    ):
        status, error = traffic(server, **rule)
        assert (status, message in error) == (400, True), error
    assert traffic(server, weights={"2": 10})[0] == 200
    status, error = change(server, "unload", version=2)
    assert (status, "the traffic rule of model 'words' names '2'" in error) == (400, True)
    with grpc.insecure_channel(server.grpc_admin) as channel:
        calls = {
            name: channel.unary_unary(
                f"/hps.v1.Admin/{name}",
                request.SerializeToString,
                admin_pb2.TrafficResponse.FromString,
            )
            for name, request in (
                ("Traffic", admin_pb2.TrafficRequest),
                ("SetTraffic", admin_pb2.SetTrafficRequest),
            )
        }
        found = calls["Traffic"](admin_pb2.TrafficRequest(model="words"), timeout=60)
        assert {each.version: each.weight for each in found.versions} == {"2": 10, "3": 90}
        rule = Struct()
        rule.update({"weights": {"2": 40}, "rollback": {"min_requests": 50}})
        request = admin_pb2.SetTrafficRequest(model="words", rule=rule)
        assert calls["SetTraffic"](request, timeout=60).versions[0].weight == 40
        rule.update({"weights": {"9": 40}})
        request = admin_pb2.SetTrafficRequest(model="words", rule=rule)
        with pytest.raises(grpc.RpcError) as failed:
            calls["SetTraffic"](request, timeout=60)
        assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    done = hps(server, "traffic", "words", "--output", "json")
    assert json.loads(done.stdout)["rule"] == {
        "weights": {"2": 40},
        "rollback": {"min_requests": 50},
    }


def test_commands_change_the_rule(server):
    done = hps(server, "traffic", "words", "--weight", "2=10", "--sticky", f"header:{USER}")
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["version", "percent"],
        ["2", "10"],
        ["3", "90"],
        ["sticky", "by", f"header:{USER}"],
    ]
    more = (
        "--match",
        "header:x-group=b:2",
        "--shadow",
        "2",
        "--shadow-rate",
        "0.5",
        "--max-psi",
        "0.3",
    )
    rule = json.loads(hps(server, "traffic", "words", *more, "--output", "json").stdout)["rule"]
    assert rule == {
        "weights": {"2": 10},
        "sticky": f"header:{USER}",
        "matches": [{"by": "header:x-group", "value": "b", "version": "2"}],
        "shadow": {"version": "2", "rate": 0.5},
        "rollback": {"max_psi": 0.3},
    }
    assert "2   3" not in hps(server, "list", "words").stdout
    listed = hps(server, "list", "words").stdout
    assert "percent" in listed
    left = hps(server, "traffic", "words", "--remove", "weights", "--remove", "shadow")
    assert "sticky" not in left.stdout
    assert "header:x-group = b: version 2" in left.stdout
    assert "automatic rollback: max_psi 0.3" in left.stdout
    for bad, message in (
        (("--weight", "2"), "--weight 2: expected VERSION=PERCENT"),
        (("--match", "x=2"), "--match x=2: expected KEY=VALUE:VERSION"),
        (("--remove", "weight"), "the parts are weights"),
        (("--weight", "7=5"), "the traffic rule names '7'"),
    ):
        done = hps(server, "traffic", "words", *bad)
        assert done.returncode != 0
        assert message in done.stderr
    assert hps(server, "traffic", "words", "--remove", "all").returncode == 0
    assert traffic(server)[1]["rule"] == {}


def test_rules_change_under_load_without_a_failure(any_server, asks):
    from tests.integration.test_model_switch import Asking

    asking = Asking(*asks[4:8])
    for share in (10, 50, 100, 1):
        assert traffic(any_server, weights={"2": share})[0] == 200
        asking.more(5)
    assert traffic(any_server)[0] == 200
    assert {ask() for ask in asks[:4] for _ in range(3)} == {3}
    asking.end()
    assert not asking.failures
    until(lambda: all({*answers} <= {2, 3} for answers in asking.answers))
