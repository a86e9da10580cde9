"""Versions of a model on a node with GPUs, in its process and an attached one: on twins and on a real GPU."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest

import hps
from hps.config.model_schema import ModelSpec
from hps.errors import GpuUnavailable
from hps.models.version_writer import write_version
from hps.native import COMPILED
from hps.node import gpu_caches
from hps.predict.scheduler.host import SchedulerHost
from hps.types import JaggedKeys
from tests.support import twin_device
from tests.support.waiting import PATIENT_GUARD, until
from tests.unit.node.test_gpu_caches import (
    DENSE,
    FEATURES,
    HELD,
    TABLES,
    network,
    request_of,
    require_network_on_gpu,
    rows,
)
from tests.unit.node.test_gpu_scheduler import HOTNESS

KEYS = np.arange(200)
STEP = 100
"""Added to all values per version."""


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    features = [f.model_copy(update={"hotness": HOTNESS.get(f.name, f.hotness)}) for f in FEATURES]
    spec = ModelSpec(name="m", tables=TABLES, features=features, dense=DENSE)
    keys = np.arange(HELD)
    for version in (1, 2, 3):
        held = {t.name: (keys, rows(keys, t.dim) + STEP * version) for t in TABLES}
        write_version(folder, spec, version, held, dense=network())
    return folder


@pytest.fixture(params=["twin", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    """Returns the caches of a node on a GPU or its twin."""
    if request.param == "twin":
        return twin_device.install(monkeypatch, 1, 1 << 26)
    return None


@pytest.fixture
def config(repository, tmp_path, device):
    return {
        "models": {"repository": str(repository), "rollback_s": 0, "serve": {"m": {"version": 1}}},
        "tiers": {
            "gpu": {"use": "required", "share": 0.5},
            "cpu_cache": {"share": 1.0, "shared": {"name": "test", "folder": str(tmp_path)}},
            "rocksdb": {"path": str(tmp_path / "db"), "guard": PATIENT_GUARD},
        },
        "server": {"runtime": str(tmp_path / "run")},
    }


@contextmanager
def opened(config, **gpu):
    tiers = config["tiers"] | {"gpu": config["tiers"]["gpu"] | gpu}
    with hps.open(config | {"tiers": tiers}) as node:
        yield node


def version_in(side, batch=3, version=None, keys=KEYS):
    """The version whose rows, all of one, are in a prediction."""
    features, dense = request_of(keys, batch)
    result = side.predict("m", features, dense, version=version)
    assert not result.defaulted
    scores = result.outputs["all"]
    users = np.broadcast_to(np.asarray(features["user"]), (batch,)) % 64
    (found,) = set((scores[:, 0] - users).astype(int).tolist())
    last = (np.asarray(features["last"]) + 5) % 64
    np.testing.assert_allclose(scores[:, -8], last[:, 0] + found)
    return found // STEP


def gpu_of(node):
    return next(each.tier for each in node.tiers if each.tier.info.name == "gpu")


def tables_on_gpu(node):
    """The versions with tables in the GPU cache."""
    return sorted({table.version for table in list(gpu_of(node).caches[0]._tables)})


def scheduled(node):
    return sorted(each.key for each in node.scheduler._models.values())


@pytest.mark.parametrize(("share", "least"), [(1.0, 1.0), (0.5, 0.8)])
def test_loaded_version_is_served_from_the_gpu(config, share, least):
    """Of all rows each finds a slot; of as many as the table has slots, some do not."""
    with opened(config, share=share) as node:
        require_network_on_gpu(node)
        assert version_in(node) == 1
        assert node.load("m", 2) == 2
        assert version_in(node) == 2
        found = node.predict("m", *request_of(np.arange(200), 300), want_source=True)
        assert (found.sources["user"] == hps.types.Source.GPU).mean() >= least
        if COMPILED:
            assert node.model("m").pipeline.is_scheduled
        until(lambda: tables_on_gpu(node) == [2])
        vectors = node.lookup_on_device("m", {"user": np.array([3])}).vectors["user"]
        assert int(np.asarray(vectors.get())[0, 0]) == 3 + 2 * STEP


@pytest.mark.skipif(not COMPILED, reason="the scheduler is part of the compiled core")
def test_versions_change_under_load_in_all_processes(config):
    """None fails, and the rows of each answer are of one version."""
    names, failed, seen, stop = [1, 2, 3], [], set(), threading.Event()

    def ask(side, batch):
        while not stop.is_set():
            try:
                seen.add((side is node, version_in(side, batch)))
            except Exception as error:
                failed.append(error)
                return

    with opened(config) as node, hps.attach(config) as process, ThreadPoolExecutor(4) as threads:
        require_network_on_gpu(node)
        for side in (node, process):
            for batch in (2, 40):
                threads.submit(ask, side, batch)
        try:
            for version in [2, 3, 1, 2]:
                node.load("m", version)
                until(lambda v=version: {(True, v), (False, v)} <= seen or failed)
                until(lambda v=version: tables_on_gpu(node) == [v] or failed)
            node.load("m", 3, switch=False, labels=["canary"])
            assert scheduled(node) == ["m/2", "m/3"]
            assert [version_in(each, version="canary") for each in (node, process)] == [3, 3]
            node.switch("m", "canary")
            assert node.rollback("m") == 2
            node.label("m", "canary", None)
            node.unload("m", 3)
            until(lambda: scheduled(node) == ["m/2"] or failed)
        finally:
            stop.set()
        assert not failed
        assert {version for _, version in seen} == set(names)
        assert version_in(process) == 2
        node.unload("m")
        until(lambda: not tables_on_gpu(node))
        assert not scheduled(node)


@contextmanager
def request_held(node, process, monkeypatch):
    """A prediction of ``process`` on the current version, outside the batches; yields what ends it."""
    begun, end = threading.Event(), threading.Event()
    served = SchedulerHost._served
    (first,) = [each.number for each in node.scheduler._models.values()]
    features, dense = request_of(np.arange(200), 3)
    features["seen"] = JaggedKeys(np.arange(6), 3, None, np.ones(6, np.float32))
    with ThreadPoolExecutor(2) as threads:

        def delayed(host, number):
            columns, answer, report = served(host, number)

            def later(request):
                begun.set()
                assert end.wait(60)
                return answer(request).result()

            # On another thread: the scheduler's has the requests of all versions.
            return (
                columns,
                partial(threads.submit, later) if number == first else answer,
                report,
            )

        monkeypatch.setattr(SchedulerHost, "_served", delayed)
        late = threads.submit(process.predict, "m", features, dense)

        def finish():
            """The version that answered."""
            end.set()
            return int(late.result(60).outputs["all"][0, 0]) // STEP

        try:
            assert begun.wait(60)
            yield finish
        finally:
            end.set()


@pytest.mark.skipif(not COMPILED, reason="the scheduler is part of the compiled core")
def test_replaced_version_answers_the_requests_in_flight(config, monkeypatch):
    """Its lanes and tables stay until then, also for requests that run outside the batches."""
    with opened(config) as node, hps.attach(config) as process:
        require_network_on_gpu(node)
        with request_held(node, process, monkeypatch) as finish:
            node.load("m", 2)
            until(lambda: version_in(process) == 2)
            assert tables_on_gpu(node) == [1, 2]
            assert finish() == 1
        until(lambda: tables_on_gpu(node) == [2])


@pytest.mark.skipif(not COMPILED, reason="the scheduler is part of the compiled core")
def test_version_is_served_when_its_former_load_is_freed(config, monkeypatch):
    """A version is loaded again while a request still uses what it had on the GPU before."""
    with opened(config) as node, hps.attach(config) as process:
        require_network_on_gpu(node)
        with request_held(node, process, monkeypatch) as finish:
            for version in (2, 1):
                node.load("m", version)
                until(lambda v=version: version_in(process) == v)
            until(lambda: scheduled(node) == ["m/1", "m/1"])
            until(lambda: tables_on_gpu(node) == [1])
            assert list(node.scheduler.status()) == ["m/1"]
            assert finish() == 1
        until(lambda: scheduled(node) == ["m/1"])
        assert (version_in(node), version_in(process)) == (1, 1)


def test_new_version_has_the_keys_that_were_hot_in_the_old_one(config):
    config["tiers"]["cpu_cache"]["share"] = 0.5
    hot = np.arange(HELD - 300, HELD)

    def share_held(node):
        """A real GPU's full table has no place for some keys."""
        table = node.model("m").tables["users"]
        return np.isin(hot, gpu_of(node).top_k(table, HELD)[0]).mean()

    with opened(config) as node:

        def ask():
            node.lookup_on_device("m", {"user": hot})
            node.writer.flush()
            return share_held(node) > 0.8

        until(ask)
        node.load("m", 2)
        assert share_held(node) > 0.7


def test_static_tables_of_a_new_version_are_filled_completely(config):
    config["models"]["serve"]["m"]["tables"] = {"users": {"gpu_static": True}}
    with opened(config) as node:
        node.load("m", 2)
        table = node.model("m").tables["users"]
        assert gpu_of(node).caches[0].sealed(table)
        assert gpu_of(node).rows(table) == HELD
        assert version_in(node, keys=np.arange(HELD)) == 2
        with pytest.raises(hps.errors.Unsupported, match="static in the GPU cache"):
            node.streams.write(
                [table], np.arange(2), np.zeros((2, 4), np.float32), np.empty(0, np.int64)
            )


def test_updates_reach_the_tables_of_a_loaded_version(config):
    with opened(config) as node:
        node.load("m", 2)
        node.write("m", "users", [3], np.full((1, 4), 7, np.float32))
        result = node.lookup_on_device("m", {"user": np.array([3])})
        assert np.asarray(result.vectors["user"].get())[0, 0] == 7


def small(monkeypatch, free):
    monkeypatch.setattr(gpu_caches, "free_bytes_on", lambda device: free)


def test_version_that_does_not_fit_the_gpu_is_refused_if_it_is_required(config, monkeypatch):
    with opened(config) as node:
        small(monkeypatch, 1000)
        with pytest.raises(
            GpuUnavailable,
            match=r"have 900 bytes left for this version, and a start would give it [\d,]+: other "
            r"versions hold [\d,]+\. Unload one of them, or lower tiers\.gpu\.capacity_bytes",
        ):
            node.load("m", 2)
        assert (version_in(node), tables_on_gpu(node)) == (1, [1])
        assert node.metrics.counter("hps_model_loads_total", "m", "failed").value == 1


def test_version_that_does_not_fit_an_optional_gpu_is_served_from_the_cpu(
    config, monkeypatch, caplog
):
    with opened(config, use="auto") as node:
        small(monkeypatch, 1000)
        assert node.load("m", 2) == 2
        assert "the version is served from the CPU cache: the GPU caches have 900" in caplog.text
        assert "the version is served from the CPU cache" in node.control.warnings["m"]
        assert version_in(node, keys=np.arange(HELD)) == 2
        until(lambda: not tables_on_gpu(node))
        small(monkeypatch, 1 << 26)
        node.load("m", 3)
        assert (version_in(node), tables_on_gpu(node)) == (3, [3])
        assert "m" not in node.control.warnings


def test_version_beside_others_gets_the_capacity_that_they_leave(config, monkeypatch):
    del config["tiers"]["gpu"]["share"]
    with opened(config, capacity_bytes=300_000) as node:
        first = gpu_of(node).capacity(node.model("m").tables["users"])
        node.load("m", 2)  # in place of the other one: all of tiers.gpu.capacity_bytes
        users = node.model("m").tables["users"]
        assert gpu_of(node).capacity(users) == first
        with pytest.raises(GpuUnavailable, match=r"or raise tiers\.gpu\.capacity_bytes"):
            node.load("m", 3, switch=False)  # beside it nothing is left
        small(monkeypatch, 200_000)
        assert node.load("m", 3) == 3
        assert "% of what a start would give the version" in node.control.warnings["m"]
        capacity = gpu_of(node).capacity(node.model("m").tables["users"])
        assert first / 2 < capacity < first


@pytest.mark.skipif(not COMPILED, reason="the scheduler is part of the compiled core")
def test_failed_load_leaves_nothing_on_the_gpu(config):
    def fail(host, model, lane):
        raise RuntimeError("lost")

    with opened(config) as node:
        with pytest.MonkeyPatch.context() as patch:
            require_network_on_gpu(node)
            patch.setattr(SchedulerHost, "add_lane", fail)
            with pytest.raises(RuntimeError, match="lost"):
                node.load("m", 2)
        assert (tables_on_gpu(node), scheduled(node)) == ([1], ["m/1"])
        assert version_in(node) == 1
        assert node.load("m", 2) == 2


def test_several_versions_are_served_from_a_start(config):
    config["models"]["versions"] = {"specific": [1, 2]}
    del config["models"]["serve"]
    with opened(config) as node:
        assert [version_in(node, version=n) for n in (1, 2)] == [1, 2]
        assert tables_on_gpu(node) == [1, 2]


@pytest.mark.skipif(not COMPILED, reason="the scheduler is part of the compiled core")
def test_closed_node_has_freed_its_lanes(config):
    """Others may still refer to the scheduler."""
    with opened(config) as node:
        lanes = [lane for each in node.scheduler._models.values() for lane in each.lanes]
        assert lanes
        assert all(lane.session is not None for lane in lanes)
    assert all(lane.session is None for lane in lanes)
