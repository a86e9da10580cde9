"""hps.open and the node: real files, RocksDB and ONNX Runtime, no server."""

import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from onnx import helper as h

import hps
from hps.config import Configuration, LegacyModel, Settings
from hps.config.model_schema import DenseSpec, FeatureSpec, ModelSpec, TableSpec, TensorSpec
from hps.errors import BadRequest, ConfigError, HpsError, ModelError, NotFound, TierError
from hps.models.version_writer import write_version
from hps.observability.metric_names import LOOKUP_SHARED
from hps.tiers.base import FetchContext, Part
from hps.tiers.mapped.tier import MappedFigures
from hps.tiers.rocksdb import RocksDbTier
from hps.tiers.rocksdb.write_throttle import StoreFigures
from hps.types import JaggedKeys, LookupRequest, PredictRequest, Source, version_now
from tests.support.onnx_networks import summing_network
from tests.support.waiting import until

USERS, ITEMS = (
    TableSpec(name="users", dim=4, default=-1.0),
    TableSpec(name="items", dim=2, dtype="float16", default=[0.5, 0.25]),
)
FEATURES = [
    FeatureSpec(name="user", table="users", context=True),
    FeatureSpec(name="item", table="items"),
    FeatureSpec(name="seen", table="items", pooling="mean"),
]
DENSE = DenseSpec(
    inputs=[TensorSpec(name="price", shape=[-1, 1])],
    outputs=[TensorSpec(name="ctr", shape=[-1, 1]), TensorSpec(name="cvr", shape=[-1, 1])],
)


def network():
    widths = {"user": 4, "item": 2, "seen": 2, "price": 1}
    return summing_network(widths, "ctr", [h.make_node("Neg", ["ctr"], ["cvr"])], cvr=1)


def rows(keys, dim, version=1):
    """The rows of ``keys`` as version ``version`` of the model has them; exact in float16."""
    return np.float32(np.asarray(keys) % 64)[:, None] + np.arange(dim, dtype=np.float32) + version


def write(folder, version=1, *, name="clicks", keys=1000, dense=DENSE, features=FEATURES):
    spec = ModelSpec(name=name, tables=[USERS, ITEMS], features=features, dense=dense)
    at = np.arange(keys) - keys // 2
    write_version(
        folder / "models",
        spec,
        version,
        {t.name: (at, rows(at, t.dim, version)) for t in spec.tables},
        dense=network() if dense else None,
        replace_spec=True,
    )


@pytest.fixture
def folder(tmp_path):
    write(tmp_path)
    return tmp_path


def settings(folder, **changes):
    """Settings of a node that keeps rows in its caches; test_mapped_node.py has others."""
    own = {"rocksdb": {"path": str(folder / "db")}, "mapped": {"memory_bytes": 0}}
    return {
        "models": {"repository": str(folder / "models"), **changes.pop("models", {})},
        "tiers": {**own, **changes.pop("tiers", {})},
        **changes,
    }


@pytest.fixture
def opened(folder):
    with hps.open(settings(folder)) as node:
        yield node


def cached(node, table="users", model="clicks"):
    return node.tiers[0].rows(node.model(model).tables[table])


# -- opening -------------------------------------------------------------------------------------


def test_importing_is_cheap():
    code = "import sys, hps; print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert not {"numpy", "onnxruntime", "rocksdict", "pydantic", "prometheus_client"} & set(loaded)
    assert hps.__version__
    with pytest.raises(AttributeError):
        _ = hps.nonsense


@pytest.mark.parametrize("kind", ["mapping", "settings", "configuration", "file"])
def test_open_accepts_every_form_of_configuration(folder, kind):
    data = settings(folder)
    if kind == "settings":
        data = Settings(**data)
    elif kind == "configuration":
        data = Configuration(settings=Settings(**data))
    elif kind == "file":
        path = folder / "config.yaml"
        path.write_text(json.dumps(data))
        data = path
    with hps.open(data) as node:
        result = node.lookup("clicks", {"user": [3]})
        np.testing.assert_array_equal(result.vectors["user"], rows([3], 4))


def test_second_start_does_not_load_rows_again(folder):
    for _ in range(2):
        with hps.open(settings(folder)) as node:
            assert node.lookup("clicks", {"user": [3]}).defaulted == 0


def test_closed_node_leaves_no_threads_or_files(folder):
    before = set(threading.enumerate())
    node = hps.open(settings(folder))
    node.lookup("clicks", {"user": [30_000]})
    node.close()
    node.close()
    assert not {t for t in threading.enumerate() if t.is_alive()} - before


def test_close_keeps_the_store_open_during_a_stuck_fetch(folder, monkeypatch):
    """Closing RocksDB during a call would end the process."""
    gate, started, fetch = threading.Event(), threading.Event(), RocksDbTier.fetch
    closed_at = []

    def hang(tier, parts, ctx):
        started.set()
        gate.wait(30)
        fetch(tier, parts, ctx)  # raises when the store was closed meanwhile

    close = RocksDbTier.close
    monkeypatch.setattr(RocksDbTier, "fetch", hang)
    monkeypatch.setattr(
        RocksDbTier, "close", lambda tier: (closed_at.append(gate.is_set()), close(tier))
    )
    db = {"path": str(folder / "db"), "guard": {"deadline_ms": 50, "failures_to_open": 10**6}}
    tiers = {"cpu_cache": {"enabled": False}, "rocksdb": db}
    node = hps.open(settings(folder, tiers=tiers))
    while not started.is_set():  # a thread may come too late
        assert node.lookup("clicks", {"user": [3]}).degraded == ("rocksdb",)
    node.close()
    assert closed_at == []
    gate.set()
    until(lambda: closed_at)
    assert closed_at == [True]


def patient(folder):
    """Settings with a guard that waits long enough for a test's blocked store."""
    return {"path": str(folder / "db"), "guard": {"deadline_ms": 120_000}}


def slow_store(monkeypatch, wait):
    """Every fetch from RocksDB calls ``wait`` first."""
    fetch = RocksDbTier.fetch
    monkeypatch.setattr(
        RocksDbTier, "fetch", lambda tier, parts, ctx: (wait(), fetch(tier, parts, ctx))
    )


def test_every_lookup_thread_reaches_the_store(folder, monkeypatch):
    """Lookups that queue for the guard's threads would make the store seem slow."""
    tiers = {"lookup_threads": 12, "cpu_cache": {"enabled": False}, "rocksdb": patient(folder)}
    with hps.open(settings(folder, tiers=tiers)) as node:
        together = threading.Barrier(12)
        slow_store(monkeypatch, lambda: together.wait(60))
        engine = node.model("clicks").engine
        waiting = [
            engine.submit(LookupRequest({"user": JaggedKeys.dense(np.array([key]))}))
            for key in range(12)  # distinct keys: single flight would join equal ones
        ]
        assert [future.result(60).degraded for future in waiting] == [()] * 12


def test_concurrent_misses_of_a_row_fetch_it_once(folder, monkeypatch):
    tiers = {"lookup_threads": 8, "cpu_cache": {"enabled": False}, "rocksdb": patient(folder)}
    with hps.open(settings(folder, tiers=tiers)) as node:
        calls, gate = [], threading.Event()
        slow_store(monkeypatch, lambda: (calls.append(1), gate.wait(60)))
        engine = node.model("clicks").engine
        keys = {"user": JaggedKeys.dense(np.array([3]))}
        waiting = [engine.submit(LookupRequest(keys)) for _ in range(8)]
        shared = node.metrics.counter(LOOKUP_SHARED)
        while shared.value < 7 or not calls:
            time.sleep(0.001)
        gate.set()
        for future in waiting:
            assert future.result(60).vectors["user"].tolist() == rows([3], 4).tolist()
        assert len(calls) == 1
        assert "hps_lookup_shared_keys_total 7.0" in node.metrics.render().decode()


def predicting(node, user):
    keys = {"user": [user], "item": [1], "seen": [1]}
    request = PredictRequest(
        {name: JaggedKeys.dense(np.array(k)) for name, k in keys.items()},
        {"price": np.ones((1, 1), np.float32)},
    )
    return node.model("clicks").pipeline.submit(request)


@pytest.fixture
def one_thread(folder, monkeypatch):
    """A node with one lookup thread and a network that never runs inline; the store waits for a gate."""
    gate = threading.Event()
    tiers, dense = {"lookup_threads": 1, "rocksdb": patient(folder)}, {"inline_us": 0}
    with hps.open(settings(folder, tiers=tiers, dense=dense)) as node:
        slow_store(monkeypatch, lambda: gate.wait(60))
        yield node, gate
        gate.set()


def test_slow_store_does_not_delay_networks(one_thread):
    node, gate = one_thread
    unknown = predicting(node, 30_000)
    assert predicting(node, 3).result(60).outputs["ctr"].shape == (1, 1)
    assert not unknown.done()
    gate.set()
    assert unknown.result(60).defaulted == 1


def test_closing_node_answers_accepted_requests(one_thread):
    node, gate = one_thread
    accepted = predicting(node, 30_000)
    threading.Timer(0.1, gate.set).start()
    node.close()
    assert accepted.result(60).outputs["ctr"].shape == (1, 1)


def test_highest_version_is_served_unless_one_is_configured(folder):
    write(folder, 10)
    write(folder, 9)
    with hps.open(settings(folder)) as node:
        assert node.model("clicks").version == 10
        np.testing.assert_array_equal(
            node.lookup("clicks", {"user": [3]}).vectors["user"], rows([3], 4, 10)
        )
    with hps.open(settings(folder, models={"serve": {"clicks": {"version": 9}}})) as node:
        assert node.model("clicks", "9").version == 9
        assert node.model("clicks", "").version == 9
        with pytest.raises(NotFound, match="'clicks' version 10 is not found; version 9 is served"):
            node.model("clicks", 10)
        with pytest.raises(NotFound, match="Request for unknown model: 'x' is not found"):
            node.lookup("x", {})


def test_only_configured_models_are_served(folder):
    write(folder, name="other", dense=None)
    with hps.open(settings(folder)) as node:
        assert set(node.models) == {"clicks", "other"}
    with hps.open(settings(folder, models={"serve": {"other": {}}})) as node:
        assert set(node.models) == {"other"}
        with pytest.raises(BadRequest, match="'other' has no dense part; use lookup"):
            node.predict("other", {"user": [1]})


def test_ps_json_model_is_served(tmp_path):
    directories = {}
    for table in (USERS, ITEMS):
        directories[table.name] = tmp_path / table.name
        directories[table.name].mkdir()
        np.arange(10).tofile(directories[table.name] / "key")
        rows(np.arange(10), table.dim).tofile(directories[table.name] / "emb_vector")
    folders = {name: (folder,) for name, folder in directories.items()}
    legacy = LegacyModel(ModelSpec(name="old", tables=[USERS, ITEMS]), folders)
    data = Settings(**settings(tmp_path, models={"serve": {"old": {"max_batch_size": 3}}}))
    for _ in range(2):
        with hps.open(Configuration(settings=data, legacy=(legacy,))) as node:
            result = node.lookup("old", {"users": [4, 99]})
            np.testing.assert_array_equal(result.vectors["users"], [rows([4], 4)[0], [-1] * 4])
            with pytest.raises(BadRequest, match="<= 3 for 'old', got 4"):
                node.lookup("old", {"users": [1, 2, 3, 4]})


def test_configuration_errors_are_raised_before_rows_are_loaded(folder):
    wrong = DENSE.model_copy(update={"outputs": [TensorSpec(name="ctr", shape=[-1, 7])]})
    write(folder, 2, dense=wrong)
    with pytest.raises(ModelError, match=r"'ctr' has shape \[-1, 7\] in model.yaml, \[-1, 1\]"):
        hps.open(settings(folder))
    assert not (folder / "db").exists()


def test_version_with_a_damaged_network_is_left_out_at_a_start(folder):
    write(folder, 2)
    with hps.open(settings(folder)) as node:
        node.load("clicks", 1, switch=False, labels=["canary"])
    (folder / "models/clicks/1/dense.onnx").write_bytes(b"x")
    with hps.open(settings(folder)) as node:
        assert [each.version for each in node.models.of("clicks")] == [2]
        assert "version 1, chosen at run time, is not served" in node.control.warnings["clicks"]
    (folder / "models/clicks/2/dense.onnx").write_bytes(b"x")
    with pytest.raises(ModelError, match="clicks/2"):
        hps.open(settings(folder))


def test_start_can_be_retried_after_a_failure(folder):
    with pytest.raises(ConfigError, match=r"has no table|no such table"):
        hps.open(settings(folder, models={"serve": {"clicks": {"tables": {"x": {}}}}}))
    (folder / "db").write_text("not a folder")
    with pytest.raises((TierError, ConfigError), match="db"):
        hps.open(settings(folder))
    (folder / "db").unlink()
    with hps.open(settings(folder)) as node:
        with pytest.raises(TierError, match="db"):
            hps.open(settings(folder))  # another node owns the database
        assert node.lookup("clicks", {"user": [3]}).defaulted == 0


def test_open_without_models_raises_config_error(tmp_path):
    (tmp_path / "models").mkdir()
    with pytest.raises(ConfigError, match=r"no model to serve: .*hps model import"):
        hps.open(settings(tmp_path))
    with pytest.raises(HpsError, match="nowhere"):
        hps.open(settings(tmp_path, models={"repository": str(tmp_path / "nowhere")}))


def test_error_without_models_names_a_folder_without_model_yaml(tmp_path):
    (tmp_path / "models/ctr/1").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"holds none; folder 'ctr' has no model\.yaml"):
        hps.open(settings(tmp_path))


# -- caches --------------------------------------------------------------------------------------


def test_stored_rows_are_promoted_into_the_cache(folder):
    tiers = {"cpu_cache": {"warm": False}, "rocksdb": {"path": str(folder / "db")}}
    with hps.open(settings(folder, tiers=tiers)) as node:
        first = node.lookup("clicks", {"user": [3, 4, 9999]}, want_source=True)
        assert first.sources["user"].tolist() == [Source.ROCKSDB, Source.ROCKSDB, Source.DEFAULT]
        assert node.writer.flush(60)
        again = node.lookup("clicks", {"user": [3, 4, 9999]}, want_source=True)
        assert again.sources["user"].tolist() == [Source.CPU, Source.CPU, Source.DEFAULT]
        np.testing.assert_array_equal(first.vectors["user"], again.vectors["user"])
        np.testing.assert_array_equal(first.versions["user"], again.versions["user"])
        assert cached(node) == 2
        assert (
            'hps_promotions_total{result="inserted",tier="cpu"} 2.0'
            in node.metrics.render().decode()
        )


def test_cache_is_warmed_from_the_start_of_the_files(folder):
    serve = {"clicks": {"tables": {"users": {"cache_rows": 128}, "items": {"cache_rows": 0}}}}
    with hps.open(settings(folder, models={"serve": serve})) as node:
        held = cached(node)
        assert 100 <= held <= 128
        assert cached(node, "items") == 0
        first = np.arange(-500, -500 + 128)
        result = node.lookup("clicks", {"user": [*first, 0]}, want_source=True)
        assert (result.sources["user"][:128] == Source.CPU).sum() == held
        assert result.sources["user"][128] == Source.ROCKSDB
        np.testing.assert_array_equal(result.vectors["user"], rows([*first, 0], 4))
        node.lookup("clicks", {"item": [1]})
        assert node.writer.flush(60)
        assert cached(node, "items") == 0  # kept out of the cache


def test_rows_streamed_into_an_empty_table_are_cached(tmp_path):
    write(tmp_path, keys=0)
    with hps.open(settings(tmp_path)) as node:
        table, key = node.model("clicks").tables["users"], np.array([7])
        row, version = rows([7], 4), np.array([version_now()], np.uint64)
        node.tiers[1].tier.insert(table, key, row, version)
        first = node.lookup("clicks", {"user": [7]}, want_source=True)
        node.writer.flush()
        second = node.lookup("clicks", {"user": [7]}, want_source=True)
    assert first.sources["user"].tolist() == [Source.ROCKSDB]
    assert second.sources["user"].tolist() == [Source.CPU]
    np.testing.assert_array_equal(second.vectors["user"], row)


def test_node_without_a_cache_serves_from_the_store(folder):
    tiers = {"cpu_cache": {"enabled": False}, "rocksdb": {"path": str(folder / "db")}}
    with hps.open(settings(folder, tiers=tiers)) as node:
        for _ in range(2):
            result = node.lookup("clicks", {"user": [3]}, want_source=True)
            assert result.sources["user"].tolist() == [Source.ROCKSDB]
            assert node.writer.flush(60)
        assert [tier["name"] for tier in node.status()["tiers"]] == ["rocksdb"]


def test_cache_share_of_one_table_can_be_overridden(folder):
    serve = {"clicks": {"tables": {"users": {"cache_share": 0.128}}}}
    with hps.open(settings(folder, models={"serve": serve})) as node:
        assert 100 <= cached(node) <= 128


def test_eviction_policy_can_be_overridden_per_table(folder):
    """A scan of other keys leaves, of two hot keys, the one whose table evicts by last use."""
    tiers = {"cpu_cache": {"eviction": "fifo", "share": 0.05, "warm": False}}
    serve = {"clicks": {"tables": {"users": {"cache_eviction": "lru"}}}}
    for models, kept in (({}, False), ({"serve": serve}, True)):
        with hps.open(settings(folder, tiers=tiers, models=models)) as node:
            cache, table = node.tiers[0].tier, node.model("clicks").tables["users"]
            capacity = cache.capacity(table)
            for key in [0, *range(1, 4 * capacity)]:
                part = Part.make(table, np.array([0]))
                cache.fetch([part], FetchContext())
                cache.insert(table, np.array([key]), rows([key], 4), np.ones(1, np.uint64))
            assert bool(part.source[0]) is kept


@pytest.mark.parametrize("layout", ["native", "hps"])
def test_warm_up_does_not_restore_overwritten_rows(folder, layout):
    tiers = {"rocksdb": {"path": str(folder / "db"), "layout": layout}}
    with hps.open(settings(folder, tiers=tiers)) as node:
        table, store = node.model("clicks").tables["users"], node.tiers[1].tier
        new = np.full((1, 4), 77, np.float32)
        store.insert(table, np.array([3]), new, np.array([version_now()], np.uint64))
        store.delete(table, np.array([4]), np.array([version_now()], np.uint64))
    with hps.open(settings(folder, tiers=tiers)) as node:
        assert cached(node) > 900
        result = node.lookup("clicks", {"user": [3, 4, 5]}, want_source=True)
        np.testing.assert_array_equal(
            result.vectors["user"], np.vstack([new, [[-1] * 4], rows([5], 4)])
        )


def test_warm_up_uses_the_last_row_of_a_repeated_key(tmp_path):
    spec = ModelSpec(name="twice", tables=[USERS])
    keys = np.concatenate([np.arange(1000), np.arange(100)])
    vectors = rows(keys, 4)
    vectors[1000:] = 77
    write_version(tmp_path / "models", spec, 1, {"users": (keys, vectors)})
    # The cache has the first of two rows with this key, not the last one, which counts.
    serve = {"twice": {"tables": {"users": {"cache_rows": 512}}}}
    for _ in range(2):
        with hps.open(settings(tmp_path, models={"serve": serve})) as node:
            assert cached(node, model="twice") > 400
            result = node.lookup("twice", {"users": np.arange(200)})
            np.testing.assert_array_equal(result.vectors["users"][:100], np.full((100, 4), 77))
            np.testing.assert_array_equal(result.vectors["users"][100:], vectors[100:200])


def test_default_then_promote_by_override(folder):
    policy = {"kind": "default_then_promote"}
    serve = {"clicks": {"tables": {"users": {"miss_policy": policy, "default": 9.0}}}}
    tiers = {"cpu_cache": {"warm": False}, "rocksdb": {"path": str(folder / "db")}}
    with hps.open(settings(folder, models={"serve": serve}, tiers=tiers)) as node:
        first = node.lookup("clicks", {"user": [3]})
        assert (first.defaulted, first.vectors["user"].tolist()) == (1, [[9.0] * 4])
        assert node.writer.flush(60)
        assert node.lookup("clicks", {"user": [3]}).defaulted == 0


# -- lookups -------------------------------------------------------------------------------------


def test_predict(opened):
    features = {"user": [3], "item": [[1], [2], [9999]], "seen": _bags([[1, 2], [], [2]])}
    result = opened.predict("clicks", features, {"price": [[1.0], [2.0], [3.0]]}, top_k=2)
    user, item = rows([3], 4).sum(), rows([1, 2], 2)
    seen = np.vstack([item.mean(axis=0), [0, 0], item[1]])
    ctr = user + np.vstack([item, [0.5, 0.25]]).sum(1) + seen.sum(1) + [1, 2, 3]
    best = np.argsort(-ctr)[:2]
    assert result.outputs["top_k_index"].tolist() == best.tolist()
    np.testing.assert_allclose(result.outputs["ctr"][:, 0], ctr[best])
    np.testing.assert_array_equal(result.outputs["cvr"], -result.outputs["ctr"])
    assert result.defaulted == 1
    assert list(
        opened.predict("clicks", features, {"price": np.ones((3, 1))}, outputs=("cvr",)).outputs
    ) == ["cvr"]


def test_predict_with_sqrtn(tmp_path):
    seen = FeatureSpec(name="seen", table="items", pooling="sqrtn")
    write(tmp_path, features=[*FEATURES[:2], seen])
    weights = np.array([3, 4, 0, -2], np.float32)
    bags = JaggedKeys(np.array([1, 2, 1, 2]), 4, np.array([0, 2, 2, 3, 4]), weights)
    with hps.open(settings(tmp_path)) as node:
        features = {"user": [3], "item": [[1], [2], [1], [2]], "seen": bags}
        scores = node.predict("clicks", features, {"price": np.ones((4, 1))}).outputs["ctr"]
        vectors = node.lookup("clicks", {"seen": _bags([[1, 2, 2, 1], []])}).vectors["seen"]
    user, item = rows([3], 4).sum(), rows([1, 2], 2)
    pooled = np.vstack([(3 * item[0] + 4 * item[1]) / 5, [0, 0], [0, 0], -item[1]])
    expected = user + item[[0, 1, 0, 1]].sum(1) + pooled.sum(1) + 1
    np.testing.assert_allclose(scores[:, 0], expected, rtol=1e-3)  # pooled vectors are float16
    np.testing.assert_array_equal(vectors, [item.sum(0), [0, 0]])  # twice the sum, by the root of 4


def test_predict_with_max_norm(tmp_path):
    user = FeatureSpec(name="user", table="users", context=True, max_norm=2)
    write(tmp_path, features=[user, *FEATURES[1:]])
    with hps.open(settings(tmp_path)) as node:
        features = {"user": [3], "item": [[1]], "seen": _bags([[]])}
        scores = node.predict("clicks", features, {"price": [[1.0]]}).outputs["ctr"]
    row = rows([3], 4)
    expected = (row * 2 / np.linalg.norm(row)).sum() + rows([1], 2).sum() + 1
    np.testing.assert_allclose(scores, [[expected]], rtol=1e-6)


def _bags(bags):
    offsets = np.cumsum([0, *map(len, bags)])
    return JaggedKeys(np.array(sum(bags, []), np.int64), len(bags), offsets)  # noqa: RUF017


@pytest.mark.parametrize(
    "keys",
    [
        [3, -4],
        [3, 2**64 - 4],
        (3, -4),
        np.array([3, 2**64 - 4], np.uint64),
        np.array([3, -4], np.int8),
    ],
)
def test_lookup_accepts_every_kind_of_keys(opened, keys):
    result = opened.lookup("clicks", {"user": keys})
    np.testing.assert_array_equal(result.vectors["user"], rows([3, -4], 4))


@pytest.mark.parametrize("keys", [[1.5], ["a"], [[1.5], [2, 3]], [2**64], None, [-1, 2**64]])
def test_lookup_rejects_keys_that_are_not_integers(opened, keys):
    with pytest.raises(BadRequest, match="user"):
        opened.lookup("clicks", {"user": keys})


class Tensor:
    """A tensor with DLPack and nothing else."""

    def __init__(self, array, *, elsewhere=False, old=False):
        self.array, self._elsewhere, self._old = array, elsewhere, old

    def __dlpack__(self, **options):
        if self._elsewhere:
            raise BufferError("the tensor is on cuda:0")
        return self.array.__dlpack__(**({} if self._old else options))

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_lookup_accepts_dlpack_keys_and_out_arrays(opened):
    out = np.zeros((2, 4), np.float32)
    result = opened.lookup("clicks", {"user": Tensor(np.array([3, 4]))}, out={"user": Tensor(out)})
    np.testing.assert_array_equal(out, rows([3, 4], 4))
    assert np.shares_memory(result.vectors["user"], out)


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ([[0.0] * 4], "must be an array or a tensor, got list"),
        (Tensor(np.zeros((1, 4), np.float32), old=True), "older than DLPack 1.0"),
        (Tensor(np.zeros((1, 4), np.float32), elsewhere=True), "not an array on the host"),
        (Tensor(np.zeros((1, 8), np.float32)[:, ::2]), "not C-contiguous"),
    ],
)
def test_invalid_out_arrays_are_rejected(opened, out, message):
    with pytest.raises(BadRequest, match=message):
        opened.lookup("clicks", {"user": [3]}, out={"user": out})


def test_out_must_be_a_mapping(opened):
    with pytest.raises(BadRequest, match=r"out must be a mapping .* got ndarray"):
        opened.lookup("clicks", {"user": [3]}, out=np.zeros((1, 4), np.float32))


def test_lookup_with_an_expired_timeout_raises_deadline_exceeded(opened):
    with pytest.raises(HpsError, match="deadline"):
        opened.lookup("clicks", {"user": [3]}, timeout_s=-1)


# -- reporting -----------------------------------------------------------------------------------


def test_status(opened):
    status = json.loads(json.dumps(opened.status()))
    assert status["version"] == hps.__version__
    figures = {
        field.name for kind in (StoreFigures, MappedFigures) for field in dataclasses.fields(kind)
    }
    reported = [{k: v for k, v in tier.items() if k not in figures} for tier in status["tiers"]]
    assert reported == [
        {"name": "cpu", "kind": "cache", "volatile": True, "shared": False, "circuit": "closed"},
        {
            "name": "rocksdb",
            "kind": "store",
            "volatile": False,
            "shared": False,
            "circuit": "closed",
            "layout": "native",
        },
    ]
    (model,) = status["models"]
    assert (model["name"], model["version"], model["dense"]) == ("clicks", 1, True)
    assert model["features"] == ["user", "item", "seen"]
    users = model["tables"][0]
    assert users["rows"]["rocksdb"] == 1000
    assert users["rows"]["cpu"] == cached(opened) > 900
    assert users["capacity_rows"]["cpu"] >= 1000
    assert (users["miss_policy"], users["dtype"]) == ("wait", "float32")


def test_disk_space_and_compactions_are_reported(opened):
    (rocksdb,) = [tier for tier in opened.status()["tiers"] if tier["name"] == "rocksdb"]
    assert rocksdb["free_bytes"] > 0
    assert rocksdb["writes_stopped"] is False
    text = opened.metrics.render().decode()
    for fact in ("free_bytes", "table_bytes", "pending_compaction_bytes", "writes_stopped"):
        assert f'hps_tier_fact{{fact="{fact}",tier="rocksdb"}}' in text
    opened.tiers[-1].tier.inner.close()
    assert "free_bytes" not in opened.status()["tiers"][-1]
    assert "hps_tier_fact" in opened.metrics.render().decode()


def test_broken_tier_does_not_break_status_and_metrics(opened):
    def broken(table):
        raise TierError("rocksdb", "gone")

    opened.tiers[1].rows = broken
    users = opened.status()["models"][0]["tables"][0]
    assert list(users["rows"]) == ["cpu"]
    text = opened.metrics.render().decode()
    assert 'hps_table_rows{model="clicks",table="users",tier="cpu",version="1"}' in text
    assert 'hps_table_rows{model="clicks",table="users",tier="rocksdb",version="1"}' not in text


def test_each_node_has_separate_metrics(folder, tmp_path_factory, monkeypatch):
    monkeypatch.setattr("hps.lookup.engine._REFETCH_AFTER_S", 60.0)  # else it may be started twice
    other = tmp_path_factory.mktemp("other")
    write(other)
    with hps.open(settings(folder)) as first, hps.open(settings(other)) as second:
        first.lookup("clicks", {"user": [3, 3, 9999]})
        first.predict("clicks", {"user": [3], "item": [1], "seen": [1]}, {"price": [[np.nan]]})
        text, unused = first.metrics.render().decode(), second.metrics.render().decode()
    assert 'hps_lookup_keys_total{model="clicks",table="users",tier="cpu",version="1"} 3.0' in text
    assert (
        'hps_lookup_keys_total{model="clicks",table="users",tier="default",version="1"} 1.0' in text
    )
    # Unique keys: 3 was requested twice, but fetched once from the tier.
    assert (
        'hps_tier_keys_total{model="clicks",result="missed",table="users",tier="cpu",version="1"} 1.0'
        in text
    )
    assert (
        'hps_tier_keys_total{model="clicks",result="missed",table="users",tier="rocksdb",version="1"} 1.0'
        in text
    )
    assert 'hps_lookup_duration_seconds_count{model="clicks",version="1"} 2.0' in text
    assert 'hps_scores_not_finite_total{model="clicks",output="ctr",version="1"} 1.0' in text
    assert 'hps_dense_duration_seconds_count{model="clicks",version="1"} 1.0' in text
    assert 'hps_model_version{model="clicks"} 1.0' in text
    assert 'hps_table_rows{model="clicks",table="users",tier="rocksdb",version="1"} 1000.0' in text
    assert "hps_lookup_keys_total{" not in unused
    assert Path("/proc").exists() == ("process_resident_memory_bytes" in text)


def test_lookup_over_many_tables(tmp_path):
    tables = [TableSpec(name=f"t{i:04}", dim=4, default=float(i)) for i in range(50)]
    spec = ModelSpec(name="wide", tables=tables)
    keys = np.arange(5)
    data = {t.name: (keys, rows(keys, 4, i)) for i, t in enumerate(tables)}
    write_version(tmp_path / "models", spec, 1, data)
    for _ in range(2):
        with hps.open(settings(tmp_path)) as node:
            result = node.lookup("wide", {t.name: [3, 99] for t in tables})
            for i, table in enumerate(tables):
                np.testing.assert_array_equal(
                    result.vectors[table.name], [rows([3], 4, i)[0], [i] * 4]
                )
            assert result.defaulted == 50


def test_database_loaded_by_another_program_is_served_unchanged(folder):
    """``load: false``: the store's rows count, whatever the files say."""
    with hps.open(settings(folder)) as node:
        assert node.lookup("clicks", {"user": [3]}).defaulted == 0
    vectors = folder / "models/clicks/1/tables/users/emb_vector"
    vectors.write_bytes(np.full((1000, 4), 66, np.float32).tobytes())
    tiers = {"rocksdb": {"path": str(folder / "db"), "load": False}}
    (folder / "models/clicks/1/manifest.json").unlink()
    with hps.open(settings(folder, tiers=tiers)) as node:
        assert cached(node) > 900
        result = node.lookup("clicks", {"user": np.arange(-500, 500)}, want_source=True)
        np.testing.assert_array_equal(result.vectors["user"], rows(np.arange(-500, 500), 4))


@pytest.mark.parametrize(("layout", "load"), [("native", False), ("hps", False), ("hps", True)])
def test_rows_of_another_dim_are_rejected_at_start(folder, layout, load):
    """Detected only at a lookup, they would open the circuit breaker for every table of the node."""
    db = {"path": str(folder / "db"), "layout": layout}
    off = {"enabled": False}
    hps.open(settings(folder, tiers={"rocksdb": db, "mapped": off})).close()
    wide = TableSpec(name="users", dim=8)
    write_version(
        folder / "models",
        ModelSpec(name="clicks", tables=[wide]),
        1,
        {"users": (np.arange(10), rows(np.arange(10), 8))},
        replace=True,
        replace_spec=True,
    )
    with pytest.raises(
        TierError, match=r"clicks/1/users: a stored row has \d+ bytes, expected \d+"
    ):
        hps.open(settings(folder, tiers={"rocksdb": {**db, "load": load}, "mapped": off}))


def test_shared_cache_is_in_status_and_removed_at_close(folder, tmp_path):
    shared = {"name": "of-a-test", "folder": str(tmp_path)}
    with hps.open(settings(folder, tiers={"cpu_cache": {"shared": shared}})) as node:
        reported = node.status()["tiers"][0]["shared_memory"]
        assert (reported["owner"], reported["readers"]) == (os.getpid(), 0)
        assert reported["bytes"] > 0
        assert Path(reported["path"]).is_dir()
    assert not Path(reported["path"]).exists()


def test_shared_cache_rejects_reserved_huge_pages():
    chosen = {"shared": {"name": "x"}, "huge_pages": "reserved"}
    with pytest.raises(ConfigError, match="reserved pages can't be shared"):
        hps.open({"tiers": {"cpu_cache": chosen}})


def test_restarted_node_is_warmed_with_hot_rows(folder, tmp_path):
    snapshot = {"path": str(tmp_path / "hot")}
    serve = {"clicks": {"tables": {"users": {"cache_rows": 16}}}}
    chosen = {"models": {"serve": serve}, "tiers": {"cpu_cache": {"snapshot": snapshot}}}
    hot = [100, 200, 300]
    for start in range(2):
        with hps.open(settings(folder, **json.loads(json.dumps(chosen)))) as node:
            result = node.lookup("clicks", {"user": hot}, want_source=True)
            assert node.writer.flush(60)
            expected = Source.CPU if start else Source.ROCKSDB
            assert (result.sources["user"] == expected).all()
            np.testing.assert_array_equal(result.vectors["user"], rows(hot, 4))
            node.lookup("clicks", {"user": hot})
            (reported,) = node.hot_keys("clicks", "users", 16)
            assert reported["table"] == "users"
            assert reported["features"] == {"user": 0}
            assert set(hot) <= set(reported["keys"])
            assert len(node.hot_keys("clicks", "users", 3)[0]["scores"]) == 3


FORGETFUL = """
import json, sys
import hps
node = hps.open(json.loads(sys.argv[1]))
node.lookup("clicks", {"user": [1, 2, 3]})
"""


def test_node_that_is_left_open_is_closed_at_the_end_of_the_process(folder, tmp_path):
    snapshot = {"path": str(tmp_path / "hot"), "interval_s": 1e6}  # else written by `close`
    tiers = {"cpu_cache": {"snapshot": snapshot}}
    config = json.dumps(settings(folder, tiers=tiers))
    done = subprocess.run(
        [sys.executable, "-c", FORGETFUL, config], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "hot").exists()
