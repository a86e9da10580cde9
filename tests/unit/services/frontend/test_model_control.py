"""The repository extension, over HTTP and over Triton's gRPC."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from hps.config import Settings
from hps.errors import Unavailable
from hps.node.served_versions import ServedModels
from services.frontend import model_control
from services.frontend.auth import Authorizer
from services.frontend.http.app import admin_app, data_app
from services.frontend.state import FrontendState
from tests.unit.services.frontend.grpc.conftest import running
from tests.unit.services.frontend.grpc.test_admin_port import FakeControl


@pytest.fixture
def control(small):
    small.node.control = FakeControl()
    return small.node.control


@pytest.fixture
def everywhere(small, control):
    """Serves with a state whose data ports load and unload, too."""
    small.state = FrontendState(settings=Settings.model_validate({"models": {"control": "all"}}))
    small.state.serve(small.node)
    return small


def test_index_reports_the_state_of_each_model(call, admin, control):
    reported = call(admin, "POST", "/v2/repository/index").json()
    found = [(each["name"], each["version"], each["state"], each["reason"]) for each in reported]
    assert found[:2] == [("ctr", "1", "READY", ""), ("ctr.lookup", "1", "READY", "")]
    assert found[-3:] == [
        ("ctr", "2", "LOADING", ""),
        ("other", "1", "UNAVAILABLE", "its manifest is damaged"),
        ("other", "7", "UNAVAILABLE", "unloaded"),
    ]
    ready = call(admin, "POST", "/v2/repository/index", json={"ready": True}).json()
    assert {each["state"] for each in ready} == {"READY"}


def test_models_are_loaded_and_unloaded_over_http(call, admin, control, error):
    path = "/v2/repository/models/other/load"
    said = {"warning": "the CPU cache is full"}
    assert call(admin, "POST", path).json() == {"name": "other", "version": "7", **said}
    body = {"parameters": {"version": "3"}}
    assert call(admin, "POST", path, json=body).json() == {"name": "other", "version": "3", **said}
    path_of_lookup = "/v2/repository/models/ctr.lookup/unload"
    assert call(admin, "POST", path_of_lookup).json() == {"name": "ctr.lookup"}
    assert control.calls == [("load", "other", None), ("load", "other", 3), ("unload", "ctr")]
    assert "model_repository" in call(admin, "GET", "/v2").json()["extensions"]
    for parameters in (3, {"version": 0}, {"version": -1}, {"version": 1.5}, {"version": "x"}):
        reply = call(admin, "POST", path, json={"parameters": parameters})
        assert reply.status_code == 400
        assert "parameter" in error(reply)


def test_data_port_rejects_model_control_and_names_the_admin_port(call, data, control, error):
    for verb in ("load", "unload"):
        reply = call(data, "POST", f"/v2/repository/models/ctr/{verb}")
        assert reply.status_code == 501
        assert error(reply).endswith("use the admin port, or set models.control: all")
    assert not control.calls
    assert "model_repository" not in call(data, "GET", "/v2").json()["extensions"]


def test_model_control_requires_role_admin(call, small, control, key_guard):
    app = admin_app(small.state, small.settings, key_guard)
    for verb in ("load", "unload"):
        path = f"/v2/repository/models/ctr/{verb}"
        for key, status in (("r", 403), ("w", 403), ("a", 200)):
            reply = call(app, "POST", path, headers={"x-api-key": key * 16})
            assert reply.status_code == status


def test_data_ports_control_models_if_the_setting_allows(call, everywhere, control):
    app = data_app(everywhere.state, everywhere.settings, Authorizer())
    assert call(app, "POST", "/v2/repository/models/ctr/load").status_code == 200
    with running(everywhere) as one, triton.InferenceServerClient(one.server.url) as client:
        assert "model_repository" in client.get_server_metadata().extensions
        client.load_model("other", config=None)
        client.unload_model("other")
        index = client.get_model_repository_index(as_json=True)["models"]
    assert control.calls == [("load", "ctr", None), ("load", "other", None), ("unload", "other")]
    assert {"name": "other", "version": "7", "state": "UNAVAILABLE", "reason": "unloaded"} in index


def test_grpc_rejects_model_control_by_default(small, control):
    with running(small) as one, triton.InferenceServerClient(one.server.url) as client:
        with pytest.raises(InferenceServerException, match=r"set models\.control: all"):
            client.load_model("ctr")
        with pytest.raises(InferenceServerException, match=r"set models\.control: all"):
            client.unload_model("ctr")
    assert not control.calls


def test_waiting_loads_do_not_block_other_requests(small, control):
    """More than a few are rejected, so that all other threads stay free."""
    small.state.serve(small.node)
    entered, gate = threading.Semaphore(0), threading.Event()

    def load(name, version=None):
        entered.release()
        assert gate.wait(60)
        return 7

    control.load = load
    with ThreadPoolExecutor(6) as pool:
        loads = [pool.submit(model_control.load, small.state, "other") for _ in range(2)]
        assert all(entered.acquire(timeout=60) for _ in loads)
        with pytest.raises(Unavailable, match="a load is running"):
            model_control.load(small.state, "other")
        model_control.unload(small.state, "other")  # does not wait
        control.unload = load
        unloads = [pool.submit(model_control.unload, small.state, "other") for _ in range(4)]
        assert all(entered.acquire(timeout=60) for _ in unloads)
        for change in (model_control.unload, model_control.rollback):
            with pytest.raises(Unavailable, match="other changes of the served versions wait"):
                change(small.state, "other")
        gate.set()
        assert [each.result(60)[0] for each in loads] == [7, 7]
    assert model_control.load(small.state, "other")[0] == 7


def test_rollbacks_that_load_do_not_block_short_changes(small, control):
    """They count as loads."""
    small.state.serve(small.node)
    entered, gate = threading.Semaphore(0), threading.Event()

    def rollback(name):
        if name == "freed":
            entered.release()
            assert gate.wait(60)
        return 1

    control.rollback, control.rollback_loads = rollback, lambda name: name == "freed"
    with ThreadPoolExecutor(6) as pool:
        loads = [pool.submit(model_control.rollback, small.state, "freed") for _ in range(2)]
        assert all(entered.acquire(timeout=60) for _ in loads)
        for change in (model_control.rollback, model_control.load):
            with pytest.raises(Unavailable, match="a load is running"):
                change(small.state, "freed")
        for _ in range(5):
            assert model_control.rollback(small.state, "other") == 1  # its version is in memory
            model_control.unload(small.state, "other")
        gate.set()
        assert [each.result(60) for each in loads] == [1, 1]


def test_models_are_refreshed_after_a_failed_change(small, control):
    small.state.serve(small.node)

    def load(name, version=None):
        small.node.models = ServedModels()
        raise Unavailable("half way")

    control.load = load
    with pytest.raises(Unavailable, match="half way"):
        model_control.load(small.state, "other")
    assert not small.state.entries


@pytest.mark.parametrize("version", ["1" * 5000, "\u00b2", "-1", "1.0", [1], 2**63, "0"])
def test_invalid_version_is_rejected(call, admin, control, error, version):
    path = "/v2/repository/models/ctr/load"
    reply = call(admin, "POST", path, json={"parameters": {"version": version}})
    assert reply.status_code == 400
    assert "'version' must be a whole number from 1" in error(reply)
    assert len(error(reply)) < 200
    assert not control.calls
