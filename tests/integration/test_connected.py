"""A process whose lookups are answered by other nodes over gRPC: the same vectors and scores, to the bit."""

import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import yaml

import hps
from hps.config.server_settings import GrpcSettings, ServerSettings
from hps.errors import ConfigError, ModelError, TierError, Unavailable
from hps.observability import metric_names as m
from hps.observability.profile import Profile
from hps.types import LookupRequest, PredictRequest
from services.frontend.auth import Authorizer
from services.frontend.grpc.server import GrpcServer
from services.frontend.state import FrontendState
from tests.support.server_thread import Running
from tests.support.waiting import PATIENT_GUARD, until


@pytest.fixture(scope="module")
def node(small_repository, tmp_path_factory):
    settings = {
        "models": {"repository": str(small_repository)},
        "tiers": {
            "rocksdb": {"path": str(tmp_path_factory.mktemp("db") / "db"), "guard": PATIENT_GUARD}
        },
    }
    with hps.open(settings) as opened:
        yield opened


@pytest.fixture(scope="module")
def ports(node):
    """Two ports of the node, as two replicas."""
    state = FrontendState()
    state.serve(node)
    at = GrpcSettings(port=0)
    running = [Running(GrpcServer(at, state, ServerSettings(), Authorizer())) for _ in range(2)]
    yield [each.server.url for each in running]
    for each in running:
        each.stop(force=True)
        each.join()


@pytest.fixture
def front(small_repository, tmp_path):
    """A repository with descriptions and networks, but no rows."""
    shutil.copytree(small_repository, tmp_path / "front", ignore=shutil.ignore_patterns("tables"))
    return tmp_path / "front"


def settings_of(front: Path, nodes, **lookup):
    return {
        "models": {"repository": str(front)},
        "lookup": {"nodes": nodes, **lookup},
    }


@pytest.fixture
def connected(front, ports):
    with hps.connect(settings_of(front, ports)) as opened:
        yield opened


def test_predictions_equal_those_of_one_process(node, connected):
    rng = np.random.default_rng(5)
    for batch in (1, 7, 64):
        offsets = np.concatenate([[0], np.cumsum(rng.integers(0, 5, batch))])
        history = hps.JaggedKeys(rng.integers(-60, 60, offsets[-1]), batch, offsets)
        features = {
            "user": rng.integers(0, 120, 1),
            "item": rng.integers(-60, 60, batch),
            "history": history,
        }
        dense = {"dense": rng.random((batch, 3), np.float32)}
        mine = connected.predict("clicks", features, dense, top_k=3, want_source=True)
        theirs = node.predict("clicks", features, dense, top_k=3, want_source=True)
        assert list(mine.outputs) == list(theirs.outputs)
        for name, values in mine.outputs.items():
            assert values.tobytes() == theirs.outputs[name].tobytes()
        assert mine.defaulted == theirs.defaulted
        rows = connected.lookup("clicks", features, want_source=True)
        expected = node.lookup("clicks", features, want_source=True)
        for name, vectors in rows.vectors.items():
            assert vectors.tobytes() == expected.vectors[name].tobytes()
            assert rows.versions[name].tolist() == expected.versions[name].tolist()


def test_a_sampled_prediction_is_kept_whole(connected):
    sample = connected.models["clicks"].sample
    until(lambda: sample.armed)
    features = {"user": [[3]], "item": [[3]], "history": [[3, 1]]}
    connected.predict("clicks", features, {"dense": np.ones((1, 3), np.float32)})
    (kept,) = sample.requests()
    assert isinstance(kept, PredictRequest)


def test_profile_contains_the_network_and_work_of_a_node(connected):
    profile = Profile()
    keys = {"word": hps.JaggedKeys.dense(np.arange(3))}
    connected.models["words"].engine.lookup(LookupRequest(keys, origin=profile))
    profile.end()
    (lookup,) = profile.as_dict()["parts"]
    encode, on_node, decode = lookup["parts"]
    assert [part["name"] for part in (encode, on_node, decode)] == ["encode", "node", "decode"]
    there = {part["name"]: part["us"] for part in on_node["parts"]}
    assert there.keys() == {"decode", "lookup", "encode"}
    assert 0 < sum(there.values()) < on_node["us"] < lookup["us"]


def test_status_lists_the_lookup_nodes(connected, ports):
    assert repr(connected) == "<hps.Connected: clicks/1, words/1; >"
    told = connected.status()["lookup_nodes"]
    assert [each["address"] for each in told] == ports
    assert [each["state"] for each in told] == ["ready", "ready"]
    assert [each["problem"] for each in told] == ["", ""]
    assert [each["models"] for each in told] == [{"clicks": 1, "words": 1}] * 2
    assert connected.problem == ""


def test_metrics_of_a_removed_node_end(connected, ports):
    """Nodes of a cluster come and go with ever new addresses."""
    by_node = m.LOOKUP_NODE_UP, m.LOOKUP_NODE_RUNNING, m.LOOKUP_NODE_REQUESTS, m.LOOKUP_NODE_RETRIES
    until(
        lambda: (
            connected.lookup("words", {"word": [3]})
            and len(connected.metrics.numbers()[m.LOOKUP_NODE_REQUESTS]) == 2
        )
    )

    def addresses():
        numbers = connected.metrics.numbers()
        return [{labels[0] for labels in numbers[metric]} for metric in by_node]

    assert addresses() == [set(ports)] * 4
    connected._nodes.all = connected._nodes.all[1:]  # as when its name is looked up again
    assert addresses() == [{ports[1]}] * 4


def test_only_configured_models_are_served(front, ports):
    chosen = settings_of(front, ports)
    chosen["models"]["serve"] = {"words": {}}
    with hps.connect(chosen) as opened:
        assert list(opened.models) == ["words"]
        assert opened.lookup("words", {"word": [3]}).vectors["word"][0, 0] == 3.0


def test_front_end_server_serves_connected_models(connected):
    """Servers accept a connected process as they accept a node."""
    state = FrontendState()
    state.serve(connected)
    assert list(state.entries) == ["clicks", "clicks.lookup", "words", "words.lookup"]
    assert state.ready


def test_different_description_is_rejected(front, ports):
    path = front / "words" / "model.yaml"
    spec = yaml.safe_load(path.read_text())
    spec["tables"][0]["dim"] = 16
    path.write_text(yaml.safe_dump(spec))
    with pytest.raises(ModelError, match=r"table 'words' .*here dim 16.* has dim 8"):
        hps.connect(settings_of(front, ports))


def test_connect_raises_without_a_reachable_node(front, tmp_path):
    with pytest.raises(TierError, match=r"lookup nodes.* 127\.0\.0\.1:1: UNAVAILABLE"):
        hps.connect(settings_of(front, ["127.0.0.1:1"]), wait_s=0)
    with pytest.raises(ConfigError, match=r"lookup\.nodes is empty"):
        hps.connect({"models": {"repository": str(front)}})
    with pytest.raises(ConfigError, match=r"lookup\.api_key_file: .*No such file"):
        hps.connect(settings_of(front, ["127.0.0.1:1"], api_key_file=str(tmp_path / "none")))


def test_models_appear_when_nodes_do(front, node):
    state = FrontendState()
    state.serve(node)
    first = Running(GrpcServer(GrpcSettings(port=0), state, ServerSettings(), Authorizer()))
    url = first.server.url
    first.stop(force=True)
    first.join()
    with hps.connect(settings_of(front, [url]), wait_s=None) as opened:
        assert not opened.models
        assert opened.problem.startswith(f"no lookup node is ready (lookup.nodes): {url}: UNAVAIL")
        changed = threading.Event()
        opened.watch(changed.set)
        at = GrpcSettings(port=int(url.rsplit(":", 1)[1]))
        again = Running(GrpcServer(at, state, ServerSettings(), Authorizer()))
        try:
            until(changed.is_set)
            assert list(opened.models) == ["clicks", "words"]
            assert opened.problem == ""
            assert opened.lookup("words", {"word": [3]}).vectors["word"][0, 0] == 3.0
        finally:
            again.stop(force=True)
            again.join()


def test_open_with_role_frontend_raises_config_error(front):
    given = settings_of(front, ["127.0.0.1:1"])
    with pytest.raises(ConfigError, match=r"server\.role is frontend: .*hps\.connect"):
        hps.open({**given, "server": {"role": "frontend"}})


def test_configured_version_needs_no_node_at_start(front):
    chosen = settings_of(front, ["127.0.0.1:1"])
    chosen["models"]["serve"] = {"words": {"version": 1}}
    refused = pytest.raises(Unavailable, match="no lookup node serves model 'words' version 1")
    with hps.connect(chosen, wait_s=0) as opened, refused:
        opened.lookup("words", {"word": [3]})
