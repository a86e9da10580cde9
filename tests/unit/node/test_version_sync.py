"""Version sync of attached processes. One process attaches to itself, and syncs on demand.

tests/integration/test_workers.py has real ones."""

import os
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import hps
from hps.config.model_schema import ModelSpec
from hps.errors import ModelError, NotFound, TierError, Unsupported
from hps.models.version_writer import write_version
from hps.native import COMPILED
from hps.node import attached as attaching
from hps.node.version_sync import VersionSync
from hps.types import Source
from tests.support.waiting import PATIENCE_S, PATIENT_GUARD, until

pytestmark = pytest.mark.skipif(not COMPILED, reason="a shared cache needs the native core")
SPEC = {"name": "words", "tables": [{"name": "left", "dim": 4}, {"name": "right", "dim": 2}]}
ROWS = 500


def write(root, version, name="words"):
    """Row ``k`` of version ``v`` is full of ``1000 * v + k``."""
    keys = np.arange(ROWS)
    tables = {
        table["name"]: (
            keys,
            np.full((ROWS, table["dim"]), 1000 * version, np.float32) + keys[:, None],
        )
        for table in SPEC["tables"]
    }
    write_version(root, ModelSpec.model_validate(SPEC | {"name": name}), version, tables)


@pytest.fixture
def repository(tmp_path):
    for version in (1, 2):
        write(tmp_path / "models", version)
    return tmp_path / "models"


@pytest.fixture
def settings(repository, tmp_path):
    with tempfile.TemporaryDirectory(prefix="hps-") as runtime:  # pytest's names are too long
        yield {
            "models": {
                "repository": str(repository),
                "rollback_s": 0,
                "serve": {"words": {"version": 1}},
            },
            "tiers": {
                "rocksdb": {"path": str(tmp_path / "db"), "guard": PATIENT_GUARD},
                "cpu_cache": {"share": 0.5},
                "mapped": {"memory_bytes": 0},  # rows come from the cache and the store
            },
            "server": {"runtime": runtime},
        }


@pytest.fixture
def node(settings):
    with hps.open(settings) as opened:
        yield opened


@pytest.fixture
def attached(node, settings):
    with hps.attach(settings) as opened:
        yield opened


def values(models, keys=range(ROWS), sources=False):
    keys = np.array(keys)
    found = models.lookup("words", {"left": keys, "right": keys}, want_source=True)
    assert not found.degraded
    assert not found.defaulted
    (value,) = {int(v) for n in found.vectors for v in found.vectors[n][:, 0] - keys}
    return (value, set(found.sources["left"].tolist())) if sources else value


def cached(tier):
    return {table.version for table in tier._tables}


def gone(node):
    until(lambda: node.control._switcher.retirement.is_idle)


def test_switch_reaches_all_attached_processes(node, attached, settings):
    changed = []
    attached.watch(lambda: changed.append(attached.model("words").version))
    with hps.attach(settings) as other:
        assert node.status()["socket"]["attached"] == [os.getpid()] * 2
        assert node.load("words", 2) == 2
        for each in (attached, other, node):
            assert values(each, sources=True) == (2000, {Source.CPU, Source.ROCKSDB})
            assert each.model("words").version == 2
    assert changed == [2]
    gone(node)
    assert cached(node.tiers[0].tier) == cached(attached.tiers[0].tier) == {2}
    assert node.load("words", 1) == 1
    assert values(attached) == 1000


def test_attach_rejects_files_that_differ_from_those_of_the_node(node, settings, repository):
    """Its manifest and its rows were replaced in place: the node has the old rows."""
    write_version(
        repository,
        ModelSpec.model_validate(SPEC),
        1,
        {"left": (np.arange(3), np.zeros((3, 4))), "right": (np.arange(3), np.zeros((3, 2)))},
        replace=True,
    )
    with pytest.raises(ModelError, match="were changed after the node had loaded version 1"):
        hps.attach(settings)
    write(repository, 3)
    assert node.load("words", 3) == 3
    with hps.attach(settings) as other:
        assert values(other) == 3000


@pytest.mark.alone  # a lookup that waits too long has defaults
def test_lookups_while_versions_change(node, attached, settings):
    """Each answer is of one version, and none fails; some attach meanwhile."""
    ended, wrong, count = threading.Event(), [], [0]

    def ask():
        try:
            while not ended.is_set():
                assert values(attached) in (1000, 2000)
                count[0] += 1
        except Exception as error:
            wrong.append(error)

    def come_and_go():
        try:
            while not ended.is_set():
                with hps.attach(settings) as other:
                    assert values(other) in (1000, 2000)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=each) for each in (ask, ask, come_and_go)]
    for thread in threads:
        thread.start()
    for version in (2, 1, 2, 1, 2):
        before = count[0]
        node.load("words", version)
        until(lambda before=before: count[0] > before + 20 or wrong)
    ended.set()
    for thread in threads:
        thread.join()
    assert not wrong
    gone(node)
    assert cached(node.tiers[0].tier) == {2}


def test_attached_lookup_in_flight_finishes_on_its_version(node, attached):
    engine = attached.model("words").engine
    for version in (2, 1, 2):  # its version is loaded and unloaded again meanwhile
        node.load("words", version)
    # Rows of the first load: the second one was unloaded again.
    until(lambda: [t.version for t in node.tiers[0].tier._tables] == [1, 1, 2, 2])
    rows = engine.lookup(hps.LookupRequest({"left": hps.JaggedKeys(np.arange(ROWS), ROWS)}))
    assert (rows.vectors["left"][:, 0] == 1000 + np.arange(ROWS)).all()
    assert not rows.degraded
    del engine
    gone(node)
    assert cached(node.tiers[0].tier) == {2}


def test_attached_processes_follow_loads_and_unloads(node, attached, repository):
    write(repository, 1, "more")
    node.load("more")
    assert attached.lookup("more", {"left": [5]}).vectors["left"].tolist() == [[1005.0] * 4]
    node.unload("more")
    with pytest.raises(NotFound, match="'more' is not found"):
        attached.lookup("more", {"left": [5]})
    gone(node)
    assert {table.model for table in attached.tiers[0].tier._tables} == {"words"}


def test_first_version_is_served_by_all_processes_when_its_load_returns(node, attached, settings):
    with hps.attach(settings) as other:
        for _ in range(5):
            node.unload("words")
            until(lambda: not attached.models and not other.models)
            node.load("words", 2)
            assert values(attached) == values(other) == 2000


def test_failed_open_in_one_process_keeps_all_on_the_served_version(node, attached, settings):
    def refuse(served):
        if served.version == 2:
            raise Unsupported("the ensemble is of version 1")

    with hps.attach(settings) as other:
        other.require(refuse)
        with pytest.raises(
            Unsupported, match=r"failed to open version 2.*: the ensemble is of version 1"
        ):
            node.load("words", 2)
        assert {values(each) for each in (node, attached, other)} == {1000}
        until(lambda: len(attached._sync._opened) == 1)
        assert cached(node.tiers[0].tier) == {1}
    assert node.load("words", 2) == 2
    assert values(attached) == 2000


def test_load_waits_for_the_successor_of_a_killed_process(node, attached, settings, monkeypatch):
    """The load waits for its successor."""
    entered, gate, opened = threading.Event(), threading.Event(), attaching.open_model

    def slow(version, *arguments):
        if version.version == 2 and not entered.is_set():
            entered.set()
            assert gate.wait(60)
        return opened(version, *arguments)

    monkeypatch.setattr(attaching, "open_model", slow)
    loading = threading.Thread(target=node.load, args=("words", 2))
    loading.start()
    assert entered.wait(60)
    attached._sync._connections.close()  # as the system does for a killed process
    until(lambda: node.socket._attached._deaths)
    assert loading.is_alive()
    with hps.attach(settings) as successor:
        loading.join()
        assert values(node) == values(successor) == 2000
    gate.set()


def test_attached_process_follows_a_restarted_node_with_another_version(settings):
    with hps.open(settings):
        attached = hps.attach(settings)
    settings["models"]["serve"]["words"]["version"] = 2
    with attached:
        with pytest.raises(AssertionError):  # degraded
            values(attached)
        with hps.open(settings):
            until(lambda: attached.model("words").version == 2)
            assert values(attached) == 2000


def test_attach_raises_when_a_version_cannot_be_opened(node, settings, repository):
    """A version that can't be opened then is an error immediately."""
    (repository / "words" / "1" / "tables" / "left" / "emb_vector").write_bytes(b"short")
    with pytest.raises(hps.HpsError):
        hps.attach(settings)
    assert not any(process.holds for process in node.socket._attached._attached.values())


def test_version_beside_the_current_one_may_fail_to_open(node, settings, repository):
    """The others are served, and so is its successor under the same label."""
    node.load("words", 2, switch=False, labels=["canary"])
    (repository / "words" / "2" / "tables" / "left" / "emb_vector").write_bytes(b"short")
    with hps.attach(settings) as other:
        assert values(other) == 1000
        with pytest.raises(NotFound, match="version canary is not found; version 1 is served"):
            other.model("words", "canary")
        write(repository, 3)
        node.load("words", 3, switch=False, labels=["canary"])
        node.unload("words", 2)
        until(lambda: "canary" in other.models.names["words"].labels)
        assert other.model("words", "canary").version == 3


def test_attach_raises_without_a_node(node, attached):
    node.close()
    attached._sync.sync()  # says nothing
    with pytest.raises(TierError):
        attached.ask_node("node")


def test_a_switch_does_not_wait_for_a_version_that_is_being_opened(
    node, attached, repository, monkeypatch
):
    assert node.load("words", 2, switch=False) == 2
    write(repository, 3)
    entered, gate, former = threading.Event(), threading.Event(), VersionSync._open

    def slow(self, token, name, version):
        if version == 3:
            entered.set()
            assert gate.wait(PATIENCE_S)
        return former(self, token, name, version)

    monkeypatch.setattr(VersionSync, "_open", slow)
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(node.load, "words", 3, switch=False)
        assert entered.wait(PATIENCE_S)
        node.switch("words", 2)
        assert (values(node), values(attached)) == (2000, 2000)
        gate.set()
        assert load.result(PATIENCE_S) == 3
