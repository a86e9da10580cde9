"""A node with rows on GPUs: on NumPy twins, and where only results count also on a real GPU."""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from onnx import TensorProto as T
from onnx import helper as h

import hps
from hps.array_inputs import jagged_keys
from hps.config.model_schema import DenseSpec, FeatureSpec, ModelSpec, TableSpec, TensorSpec
from hps.cuda import cuda_graph as recording
from hps.cuda.layout import ROOMY_LOAD, EvictionPolicy
from hps.cuda.loader import cupy
from hps.dense.lanes import NetworkLane
from hps.dense.onnx import OnnxModel
from hps.errors import (
    BadRequest,
    ConfigError,
    DeadlineExceeded,
    GpuUnavailable,
    ModelError,
    Unavailable,
)
from hps.models.version_writer import write_version
from hps.native import COMPILED
from hps.node import gpu_caches, gpu_models
from hps.node.gpu_caches import device_count
from hps.observability.metric_names import FEATURE_KEYS, GPU_MEMORY_TOTAL, LOOKUP_KEYS
from hps.observability.profile import Profile
from hps.tiers.base import FetchContext, Part
from hps.tiers.gpu import device_space as gpu_space
from hps.tiers.gpu import memory as gpu_memory
from hps.tiers.gpu.memory import GpuMemoryUsage
from hps.tiers.rocksdb import RocksDbTier
from hps.types import JaggedKeys, PredictRequest, Source, version_now
from hps.updates.hot_key_snapshot import read_hot_keys
from tests.support import onnx_networks, twin_device
from tests.support.waiting import PATIENT_GUARD, until

TABLES = [
    TableSpec(name="users", dim=4, default=-1.0),
    TableSpec(name="items", dim=2, dtype="float16", default=[0.5, 0.25]),
]
FEATURES = [
    FeatureSpec(name="user", table="users", context=True),
    FeatureSpec(name="item", table="items"),
    FeatureSpec(name="seen", table="items", pooling="mean"),
    FeatureSpec(name="last", table="users", pooling="none", hotness=2, key_offset=5),
]
DENSE = DenseSpec(
    inputs=[TensorSpec(name="price", shape=[-1, 1])],
    outputs=[TensorSpec(name="ctr", shape=[-1, 1]), TensorSpec(name="all", shape=[-1, 17])],
)
HELD = 1000
TIERS = ("gpu", "cpu", "default")


def network():
    inputs = {"user": 4, "item": 2, "seen": 2, "price": 1, "last": (T.FLOAT, ["batch", 2, 4])}
    flat = [name for name in inputs if name != "last"]
    nodes = [
        h.make_node("Flatten", ["last"], ["flat"], axis=1),
        h.make_node("Concat", [*flat, "flat"], ["all"], axis=1),
        h.make_node("ReduceSum", ["all", "axes"], ["ctr"], keepdims=1),
    ]
    axes = h.make_tensor("axes", T.INT64, [1], [1])
    return onnx_networks.network(nodes, inputs, {"ctr": 1, "all": 17}, [axes])


def rows(keys, dim):
    """Exact in float16."""
    return np.float32(np.asarray(keys) % 64)[:, None] + np.arange(dim, dtype=np.float32)


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    spec = ModelSpec(name="m", tables=TABLES, features=FEATURES, dense=DENSE)
    keys = np.arange(HELD)
    held = {table.name: (keys, rows(keys, table.dim)) for table in TABLES}
    write_version(folder, spec, 1, held, dense=network())
    return folder


@pytest.fixture
def open_node(repository, tmp_path, monkeypatch):
    """Opens nodes on ``gpus`` twins (None: on none) of the repository; ``node.gpus`` are their caches."""
    opened = []

    def open_it(gpus=1, gpu=None, cpu=None, tables=None, rocksdb=None, mapped=False, **settings):
        caches = [] if gpus is None else twin_device.install(monkeypatch, gpus)
        tiers = {"gpu": gpu or {}, "cpu_cache": cpu or {"share": 1.0}}
        tiers["mapped"] = {} if mapped else {"memory_bytes": 0}
        tiers["rocksdb"] = {
            "path": str(rocksdb or tmp_path / f"db{len(opened)}"),
            "guard": PATIENT_GUARD,
        }
        serve = {"m": {"tables": tables or {}}}
        # Requests that are sampled for warm-ups take another path than their like.
        models = {"repository": str(repository), "serve": serve, "warm_up_s": 0}
        node = hps.open({"models": models, "tiers": tiers, **settings})
        opened.append(node)
        return node, caches

    yield open_it
    for node in opened:
        node.close()


@pytest.fixture
def pair(open_node):
    """A node with a GPU's twin, one without, and the former's caches."""
    node, caches = open_node(gpu={"share": 0.5})
    return node, open_node(gpus=None, gpu={"use": "off"})[0], caches


@pytest.fixture(params=["twin", pytest.param("gpu", marks=pytest.mark.gpu)])
def both(open_node, request):
    """A node with a GPU, or its twin, and one without."""
    gpus = 1 if request.param == "twin" else None
    node, _ = open_node(gpus=gpus, gpu={"share": 0.5, "use": "required"})
    return node, open_node(gpus=None, gpu={"use": "off"}, dense={"provider": "cpu"})[0]


def table_of(node, name):
    return node.model("m").tables[name]


def require_network_on_gpu(node):
    """Skip the test if the network of ``node``, which has a real GPU or its twin, runs on the CPU."""
    if not gpu_models.runs_on_gpu(node.model("m").pipeline.dense):
        pytest.skip(
            "the network runs on the CPU: onnxruntime-gpu or its CUDA libraries are missing"
        )


def request_of(keys, batch):
    rng = np.random.default_rng(batch)

    def pick(n):
        return rng.choice(keys, n)

    features = {
        "user": pick(batch),
        "item": pick((batch, 3)),
        "seen": pick((batch, 2)),
        "last": pick((batch, 2)) - 5,
    }
    return features, {"price": rng.random((batch, 1), np.float32)}


def same(one, other):
    assert one.outputs.keys() == other.outputs.keys()
    for name, values in other.outputs.items():
        np.testing.assert_allclose(one.outputs[name], values, rtol=1e-5, atol=1e-6)
        assert one.outputs[name].dtype == values.dtype
    assert (one.defaulted, one.degraded) == (other.defaulted, other.degraded)


# -- predictions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [(0, 200), (0, HELD), (HELD - 100, HELD + 100)], ids=str)
@pytest.mark.parametrize("batch", [0, 1, 7, 300])
def test_gpu_predictions_equal_host_predictions(both, batch, keys):
    node, plain = both
    for _ in range(3):
        features_and_dense = request_of(np.arange(*keys), batch)
        same(node.predict("m", *features_and_dense), plain.predict("m", *features_and_dense))
        node.writer.flush()


def test_model_with_max_norm_is_served_from_the_host(tmp_path, monkeypatch):
    features = [each.model_copy(update={"max_norm": 2.0}) for each in FEATURES]
    spec = ModelSpec(name="m", tables=TABLES, features=features, dense=DENSE)
    keys = np.arange(HELD)
    held = {table.name: (keys, rows(keys, table.dim)) for table in TABLES}
    write_version(tmp_path / "models", spec, 1, held, dense=network())
    models = {"repository": str(tmp_path / "models"), "warm_up_s": 0}
    twin_device.install(monkeypatch, 1)
    outputs, features_and_dense = [], request_of(keys[:200], 7)
    for use in ("required", "off"):
        gpu = {"use": use, "share": 1.0}
        tiers = {"gpu": gpu, "rocksdb": {"path": str(tmp_path / "db"), "guard": PATIENT_GUARD}}
        with hps.open({"models": models, "tiers": tiers}) as node:
            outputs.append(node.predict("m", *features_and_dense).outputs["all"])
            with pytest.raises(BadRequest, match=r"no GPU cache .*max_norm"):
                node.lookup_on_device("m", {"user": [3]})
    assert outputs[0].tobytes() == outputs[1].tobytes()
    user = outputs[0][:, :4]
    np.testing.assert_allclose(np.linalg.norm(user, axis=1), 2, rtol=1e-6)


def test_model_with_padded_vectors_is_predicted_from_the_host(tmp_path, monkeypatch, caplog):
    last = {"hotness": None, "max_length": 3, "truncation": "keep_last"}
    features = [*FEATURES[:-1], FEATURES[-1].model_copy(update=last)]
    inputs = {"user": 4, "item": 2, "seen": 2, "price": 1, "last": (T.FLOAT, ["batch", 3, 4])}
    nodes = [
        h.make_node("Flatten", ["last"], ["flat"], axis=1),
        h.make_node("Concat", ["user", "item", "seen", "price", "flat", "mask"], ["all"], axis=1),
    ]
    onnx = onnx_networks.network(nodes, {**inputs, "mask": 3}, {"all": 24})
    dense = DenseSpec(
        inputs=DENSE.inputs,
        masks={"last": "mask"},
        outputs=[TensorSpec(name="all", shape=[-1, 24])],
    )
    spec = ModelSpec(name="m", tables=TABLES, features=features, dense=dense)
    keys = np.arange(HELD)
    held = {table.name: (keys, rows(keys, table.dim)) for table in TABLES}
    write_version(tmp_path / "models", spec, 1, held, dense=onnx)
    models = {"repository": str(tmp_path / "models"), "warm_up_s": 0}
    twin_device.install(monkeypatch, 1)
    features, dense = request_of(keys[:200], 3)
    features["last"] = [[1], [], [2, 3, 4, 5]]
    outputs = []
    caplog.set_level(logging.INFO, logger="hps.node.gpu_models")
    for use in ("required", "off"):
        gpu = {"use": use, "share": 1.0}
        tiers = {"gpu": gpu, "rocksdb": {"path": str(tmp_path / "db"), "guard": PATIENT_GUARD}}
        with hps.open({"models": models, "tiers": tiers}) as node:
            outputs.append(node.predict("m", features, dense).outputs["all"])
            assert not node.model("m").pipeline.is_scheduled
            if use == "required":
                there = node.lookup_on_device("m", {"last": features["last"]}).vectors["last"]
                expected = rows(np.array([1, 2, 3, 4, 5]) + 5, 4)
                assert np.asarray(there).tobytes() == expected.tobytes()
    assert "model m: a feature has max_length; predictions pad its vectors" in caplog.text
    assert outputs[0].tobytes() == outputs[1].tobytes()
    assert outputs[0][:, -3:].tolist() == [[1, 0, 0], [0, 0, 0], [1, 1, 1]]
    last = outputs[0][:, 9:-3].reshape(3, 3, 4)
    assert last[0].tobytes() == np.vstack([rows([6], 4), np.zeros((2, 4), np.float32)]).tobytes()
    assert last[2].tobytes() == rows([8, 9, 10], 4).tobytes()


@pytest.mark.parametrize("gpus", [1, pytest.param(None, marks=pytest.mark.gpu)])
def test_feature_with_several_tables_is_fed_from_the_device(tmp_path, monkeypatch, gpus):
    features = [FeatureSpec(name="ad", table=["users", "items"])]
    names = [name for feature in features for name in feature.vectors]
    tensor = (T.FLOAT, ["batch", None])
    concat = h.make_node("Concat", names, ["all"], axis=1)
    network = onnx_networks.network([concat], dict.fromkeys(names, tensor), {"all": tensor})
    dense = DenseSpec(outputs=[TensorSpec(name="all", shape=[-1, 6])])
    spec = ModelSpec(name="m", tables=TABLES, features=features, dense=dense)
    keys = np.arange(HELD)
    held = {table.name: (keys, rows(keys, table.dim)) for table in TABLES}
    write_version(tmp_path / "models", spec, 1, held, dense=network)
    if gpus:
        twin_device.install(monkeypatch, gpus)
    gpu = {"use": "required", "share": 1.0}
    tiers = {"gpu": gpu, "rocksdb": {"path": str(tmp_path / "db"), "guard": PATIENT_GUARD}}
    with hps.open({"models": {"repository": str(tmp_path / "models")}, "tiers": tiers}) as node:
        features_and_dense = np.array([[3, 70], [HELD, 5]])
        for _ in range(3):
            found = node.predict("m", {"ad": features_and_dense}).outputs["all"]
            users, items = rows([3, 70, 0, 5], 4), rows([3, 70, 0, 5], 2)
            users[2], items[2] = -1.0, [0.5, 0.25]  # the defaults
            expected = np.hstack([users.reshape(2, 2, 4).sum(1), items.reshape(2, 2, 2).sum(1)])
            np.testing.assert_allclose(found, expected, rtol=1e-5)
            node.writer.flush()


@pytest.mark.parametrize("batch", [1, 7, 300])
def test_resident_gpu_rows_give_the_scores_of_host_rows(pair, batch):
    node, plain, (cache,) = pair
    features_and_dense = request_of(np.arange(200), batch)
    pooled, fetched = cache.pooled, len(cache.fetched)
    for _ in range(3):
        same(node.predict("m", *features_and_dense), plain.predict("m", *features_and_dense))
    assert cache.pooled == pooled + 3
    assert len(cache.fetched) == fetched  # one launch each, nothing else


def profiled_device_part(node, keys):
    """The part ``device`` in the profile of a prediction."""
    features, dense = request_of(keys, 7)
    profile = Profile()
    request = PredictRequest(jagged_keys(features), dense, origin=profile)
    node.model("m").pipeline.predict(request)
    (device,) = [part for part in profile.parts if part.name == "device"]
    return device


@pytest.mark.parametrize("gpus", [1, pytest.param(None, marks=pytest.mark.gpu)])
def test_profile_shows_the_work_of_the_device(open_node, gpus):
    """With static tables, which hold every row: a table filled to its capacity may have evicted some."""
    tables = {name: {"gpu_static": True} for name in ("users", "items")}
    node, _ = open_node(gpus=gpus, gpu={"share": 1.0, "use": "required"}, tables=tables)
    require_network_on_gpu(node)
    device = profiled_device_part(node, np.arange(200))
    rows, network = device.parts
    assert (rows.name, network.name) == ("rows", "network")
    assert 0 < rows.ns + network.ns <= device.ns


def test_profile_shows_rows_and_network_twice_when_a_row_is_missing(pair):
    """The network has run before the missing row is detected, and runs again with the completed rows."""
    node, _, _ = pair
    names = [part.name for part in profiled_device_part(node, np.arange(900, HELD)).parts]
    assert names == ["rows", "network", "rows", "network"]


@pytest.mark.parametrize("first", [0, HELD - 100])
def test_gpu_misses_are_filled_from_the_host(pair, first):
    node, plain, (cache,) = pair
    features_and_dense = request_of(np.arange(first, HELD + 100), 40)
    same(node.predict("m", *features_and_dense), plain.predict("m", *features_and_dense))
    assert cache.fetched
    assert cache.space.lent == (3 if COMPILED else 2)  # the lanes' own


@pytest.mark.parametrize("ask", ["predict", "look up"])
def test_rows_are_counted_by_source(pair, ask):
    """From the GPU alone, completed by one gather, or, as one was deleted, key by key."""
    node, _, _ = pair
    users = table_of(node, "users")
    node.writer.delete(users, np.array([990]), np.full(1, version_now(), np.uint64)).result()
    node.writer.close()  # no more promotions

    def counted():
        numbers = node.metrics.numbers()
        tiers = {tier: numbers[LOOKUP_KEYS].get(("m", "1", "users", tier), 0) for tier in TIERS}
        features = {
            (feature, result): numbers[FEATURE_KEYS].get(("m", "1", feature, result), 0)
            for feature in ("user", "last")
            for result in ("found", "defaulted")
        }
        return tiers | features

    for keys in ([1, 2, 2], [3, 800, 801], [4, 5, 990], [802, 803, 803]):
        features, dense = request_of(np.arange(200), 3)
        features |= {"user": np.array(keys), "last": np.tile(np.array(keys) - 5, (2, 1)).T.copy()}
        before = counted()
        if ask == "predict":
            defaulted = node.predict("m", features, dense).defaulted
        else:
            defaulted = node.lookup_on_device("m", features).defaulted
        changed = {name: n - before[name] for name, n in counted().items() if n != before[name]}
        tiers = ["default" if k == 990 else "cpu" if k > 700 else "gpu" for k in 3 * keys]
        unknown = keys.count(990)
        expected = {name: tiers.count(name) for name in set(tiers)} | {
            ("user", "found"): 3 - unknown,
            ("user", "defaulted"): unknown,
            ("last", "found"): 6 - 2 * unknown,
            ("last", "defaulted"): 2 * unknown,
        }
        assert changed == {name: n for name, n in expected.items() if n}
        assert defaulted == tiers.count("default")


def test_bags_with_offsets_and_weights_equal_host_results(both):
    node, plain = both
    features, dense = request_of(np.arange(400, 700), 3)
    bags = JaggedKeys(np.array([400, 1, 2, 999, 5000]), 3, np.array([0, 0, 4, 5]))
    weights = np.array([0.5, 2, 1, 1, 3], np.float32)
    features["seen"] = bags
    features["item"] = JaggedKeys(bags.keys, 3, bags.offsets, weights)
    same(node.predict("m", features, dense), plain.predict("m", features, dense))


def test_candidates_share_their_context(pair):
    node, plain, (cache,) = pair
    features, dense = request_of(np.arange(200), 9)
    features["user"] = features["user"][:1]
    for _ in range(2):
        one, other = (n.predict("m", features, dense, top_k=4) for n in (node, plain))
        same(one, other)
        assert len(one.outputs["top_k_index"]) == 4
    assert cache.pooled == 2
    one, other = (n.predict("m", features, dense, outputs=("all",)) for n in (node, plain))
    same(one, other)


def test_alternating_batch_sizes_give_host_results(both):
    node, plain = both
    for batch in [*range(1, 50), 2000, 3, 700]:
        features_and_dense = request_of(np.arange(200), batch)
        same(node.predict("m", *features_and_dense), plain.predict("m", *features_and_dense))


def test_repeated_run_is_recorded_once(pair, monkeypatch):
    node, plain, (cache,) = pair
    monkeypatch.setattr(OnnxModel, "records", True)
    for step in range(8):
        features_and_dense = request_of(np.arange(step, 200), 5)
        same(node.predict("m", *features_and_dense), plain.predict("m", *features_and_dense))
    assert cache.space.recorded == 1


@pytest.mark.gpu
def test_recorded_runs_equal_plain_runs_during_writes(open_node, monkeypatch):
    made = []
    monkeypatch.setattr(
        gpu_space,
        "record",
        lambda *arguments: made.append(recording.record(*arguments)) or made[-1],
    )
    node, _ = open_node(gpus=None, gpu={"share": 0.5, "use": "required"})
    require_network_on_gpu(node)
    plain, _ = open_node(gpus=None, gpu={"use": "off"}, dense={"provider": "cpu"})
    table, keys = table_of(node, "users"), np.arange(HELD)
    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(
            lambda: [
                node.writer.update(
                    table, keys, rows(keys, 4), np.full(HELD, version_now(), np.uint64)
                ).result()
                for _ in range(200)
            ]
        )
        for batch in [1, 7, 300, 2] * 12:
            features_and_dense = request_of(np.arange(200), batch)
            same(node.predict("m", *features_and_dense), plain.predict("m", *features_and_dense))
        written.result()
    assert len(made) >= 4
    assert None not in made


def test_sources_are_reported(pair):
    node, _, _ = pair
    features, dense = request_of(np.arange(200), 2)
    features["user"] = np.array([3, 900])
    result = node.predict("m", features, dense, want_source=True)
    assert result.sources["user"].tolist() == [Source.GPU, Source.CPU]


def test_misses_back_off_the_fast_path(pair):
    node, _, (cache,) = pair
    node.writer.close()  # no more promotions
    features_and_dense = request_of(np.array([999, 5000]), 2)
    for _ in range(40):
        node.predict("m", *features_and_dense)
    assert 3 <= cache.pooled <= 6
    hits = request_of(np.arange(200), 2)
    for _ in range(70):
        node.predict("m", *hits)
    before = cache.pooled
    node.predict("m", *hits)
    assert cache.pooled == before + 1


def test_invalid_request_is_rejected_as_without_a_gpu(pair):
    for keys in ({"item": np.ones((2, 3), np.int64)}, {"last": np.ones((3, 1), np.int64)}):
        features, dense = request_of(np.arange(9), 3)
        raised = []
        for node in pair[:2]:
            with pytest.raises(BadRequest) as error:
                node.predict("m", features | keys, dense)
            raised.append(str(error.value))
        assert raised[0] == raised[1]
    with pytest.raises(DeadlineExceeded):
        pair[0].predict("m", features, dense, timeout_s=-1)


@pytest.mark.parametrize("on_device", [False, True])
def test_arrays_of_a_known_form_are_looked_up_without_conversion(pair, on_device, monkeypatch):
    node, plain, _ = pair
    served = node.model("m")
    put = served.on_devices[0].cache.space.bytes  # the twin's memory

    def keys_of(values):
        array = np.array(values, np.int64)
        if not on_device:
            return array
        there = put(array.nbytes).view(np.int64).view(twin_device.Array)
        there[:] = array
        return there

    node.lookup_on_device("m", {"user": keys_of([1, 2])})
    with monkeypatch.context() as patch:
        patch.setattr(type(served), "keys", lambda *_: pytest.fail("the keys were converted"))
        got = node.lookup_on_device("m", {"user": keys_of([5, 3])}).vectors["user"]
    expected = plain.lookup("m", {"user": np.array([5, 3])}).vectors["user"]
    np.testing.assert_array_equal(np.asarray(got), expected)
    for other in ([5, 3], np.array([5, 3], np.int32), np.array([[5], [3]]), np.arange(3)):
        got = node.lookup_on_device("m", {"user": other}).vectors["user"]
        expected = plain.lookup("m", {"user": other}).vectors["user"]
        np.testing.assert_array_equal(np.asarray(got), expected)


def test_large_runs_use_a_pool_thread(open_node):
    node, (cache,) = open_node(dense={"inline_us": 0})
    plain, _ = open_node(gpus=None, gpu={"use": "off"})
    for keys in (np.arange(200), np.arange(900, 1100)):
        features_and_dense = request_of(keys, 64)
        same(node.predict("m", *features_and_dense), plain.predict("m", *features_and_dense))
    assert cache.pooled


@pytest.mark.parametrize("last", [200, HELD, 3 * HELD])
def test_device_vectors_equal_host_vectors(both, last):
    node, plain = both
    features = request_of(np.arange(last), 50)[0]
    features["item"] = JaggedKeys(np.arange(9) % 4, 3, np.array([0, 4, 4, 9]))
    for name in features:
        one = node.lookup_on_device("m", {name: features[name]}, want_source=True)
        other = plain.lookup("m", {name: features[name]}, want_source=True)
        vectors = one.vectors[name]
        vectors = vectors.get() if hasattr(vectors, "get") else vectors
        assert vectors.tobytes() == other.vectors[name].tobytes()
        np.testing.assert_array_equal(one.versions[name], other.versions[name])
        assert one.defaulted == other.defaulted
    by_table = node.lookup_on_device("m", {"users": [1, 1, 5000]}, by_table=True)
    assert by_table.vectors["users"].shape == (3, 4)
    with pytest.raises(BadRequest, match="no feature"):
        node.lookup_on_device("m", {"usr": [1]})


@pytest.mark.parametrize("last", [200, HELD, 3 * HELD])
def test_keys_on_the_device_give_the_same_vectors(both, last):
    """Of rows on the GPU, in host memory, deleted or nowhere; unpooled, pooled, with offsets and weights."""
    node, plain = both
    gone = np.array([3, 997]), np.full(2, version_now(), np.uint64)
    for each in both:
        each.writer.delete(table_of(each, "users"), *gone).result()
    for turn in range(3):
        features = request_of(np.arange(turn, last), 50)[0]
        features["user"] = np.where(features["user"] > 900, 997, features["user"])
        weights = np.arange(50, dtype=np.float32)
        bags = JaggedKeys(features["item"][:, 0].copy(), 10, np.arange(0, 51, 5), weights)
        for mine in ({**features, "last": features["last"].astype(np.uint64)}, {"item": bags}):
            mixed = {name: on_device(node, keys, name != "seen") for name, keys in mine.items()}
            one, other = node.lookup_on_device("m", mixed), plain.lookup("m", mine)
            for name in mine:
                vectors = one.vectors[name]
                vectors = vectors.get() if hasattr(vectors, "get") else vectors
                assert vectors.tobytes() == other.vectors[name].tobytes()
            assert one.defaulted == other.defaulted


def on_device(node, keys, there):
    """``keys`` on the node's device, if ``there``."""
    space = node.model("m").on_devices[0].cache.space
    if not there:
        return keys
    if isinstance(keys, JaggedKeys):
        return JaggedKeys(space.upload(keys.keys), keys.batch, keys.offsets, keys.weights)
    return space.upload(keys)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["cupy", "torch", "dlpack", "int32", "strided"])
def test_arrays_of_other_libraries_on_the_device_are_keys(open_node, kind):
    torch = pytest.importorskip("torch")
    node, _ = open_node(gpus=None, gpu={"share": 0.5, "use": "required"})
    keys, cp = np.arange(300, 700), cupy()
    there = {
        "cupy": lambda: cp.asarray(keys),
        "torch": lambda: torch.from_numpy(keys).cuda(),
        "dlpack": lambda: DlpackOnly(torch.from_numpy(keys).cuda()),
        "int32": lambda: cp.asarray(keys, np.int32),
        "strided": lambda: cp.repeat(cp.asarray(keys), 2)[::2],
    }[kind]()
    vectors = node.lookup_on_device("m", {"user": there}).vectors["user"]
    np.testing.assert_array_equal(vectors.get(), rows(keys, 4))
    with pytest.raises(BadRequest, match="keys on a device must be integers"):
        node.lookup_on_device("m", {"user": cp.ones(3, np.float32)})
    with pytest.raises(BadRequest, match="not an array on the host"):
        node.lookup("m", {"user": there})


class DlpackOnly:
    def __init__(self, tensor):
        self.__dlpack__, self.__dlpack_device__ = tensor.__dlpack__, tensor.__dlpack_device__


@pytest.mark.parametrize("name", ["user", "seen"])
def test_strided_keys_in_bags_are_looked_up_like_others_of_their_form(pair, name):
    node, plain, _ = pair
    for mine in (np.arange(20), np.arange(40)[::2], np.arange(20)):
        features = {name: JaggedKeys(mine, 10 if name == "seen" else 20)}
        vectors = node.lookup_on_device("m", features).vectors[name]
        np.testing.assert_array_equal(vectors, plain.lookup("m", features).vectors[name])


def test_predictions_take_strided_keys_in_bags(pair):
    node, plain, _ = pair
    for _ in range(2):
        features, dense = request_of(np.arange(200), 30)
        features["user"] = JaggedKeys(np.repeat(features["user"], 2)[::2], 30)
        same(node.predict("m", features, dense), plain.predict("m", features, dense))


def test_only_simultaneous_lookups_take_streams_of_their_own(open_node, monkeypatch):
    node, (cache,) = open_node(gpu={"share": 1.0})
    space, lent, met = cache.space, cache.space.lent, threading.Barrier(2, timeout=30)
    real = cache.fill_misses
    for turn in (1, 2):
        node.lookup_on_device("m", {"user": np.arange(5)})
        assert (space.shared, space.lent) == (turn, lent)

    def fill_misses(*args):
        met.wait()
        seen.append((space.shared, space.lent))
        met.wait()
        return real(*args)

    seen = []
    monkeypatch.setattr(cache, "fill_misses", fill_misses)
    with ThreadPoolExecutor(2) as threads:
        asked = [threads.submit(node.lookup_on_device, "m", {"user": np.arange(5)}) for _ in "12"]
        for each in asked:
            np.testing.assert_array_equal(each.result().vectors["user"], rows(np.arange(5), 4))
    assert seen == [(3, lent + 1)] * 2
    assert space.lent == lent


SLOW = """extern "C" __global__ void slow() {
  const long long begin = clock64();
  while (clock64() - begin < 20000000) {}
}"""


@pytest.mark.gpu
@pytest.mark.parametrize("has_own_stream", [False, True])
def test_keys_are_read_after_the_work_on_the_current_stream(open_node, has_own_stream):
    node, _ = open_node(gpus=None, gpu={"share": 1.0, "use": "required"})
    cp = cupy()
    slow = cp.RawKernel(SLOW, "slow")
    with cp.cuda.Stream(non_blocking=True) if has_own_stream else cp.cuda.Stream.null as stream:
        keys = cp.zeros(100, np.int64)
        for first in (100, 300, 500):
            later = cp.arange(first, first + 100)
            node.lookup_on_device("m", {"user": keys})  # on an idle stream
            slow((1,), (1,), ())
            keys[:] = later
            assert not stream.done
            vectors = node.lookup_on_device("m", {"user": keys}).vectors["user"]
            np.testing.assert_array_equal(vectors.get(), rows(np.arange(first, first + 100), 4))


def test_concurrent_lookups_return_correct_rows(both):
    node, plain = both
    features_and_dense = [
        request_of(np.arange(100 * i, 100 * i + 300), 1 + 13 * i) for i in range(8)
    ]
    expected = [plain.predict("m", *each) for each in features_and_dense]
    with ThreadPoolExecutor(8) as threads:
        for _ in range(20):
            answers = threads.map(lambda each: node.predict("m", *each), features_and_dense)
            for one, other in zip(answers, expected, strict=True):
                same(one, other)


# -- promotion -------------------------------------------------------------------------------------


def test_rows_of_the_cpu_cache_are_promoted_to_the_gpu(pair):
    node, _, (cache,) = pair
    users = table_of(node, "users")
    assert cache.keys_of(users) == list(range(500))
    features_and_dense = request_of(np.arange(600, 640), 20)
    node.predict("m", *features_and_dense)
    promoted = set(features_and_dense[0]["user"].tolist())
    until(lambda: promoted <= set(cache.keys_of(users)))

    def is_pooled():
        before = len(cache.fetched)
        node.predict("m", *features_and_dense)
        return len(cache.fetched) == before

    until(is_pooled)


def test_rows_of_mapped_files_are_served_and_promoted(open_node):
    node, (cache,) = open_node(gpu={"share": 0.5}, mapped=True)
    plain = open_node(gpus=None, gpu={"use": "off"})[0]
    users, keys = table_of(node, "users"), np.arange(600, 640)
    assert node.tiers[0].describe()["mapped_tables"] == len(TABLES)
    assert node.tiers[0].rows(users) == 0
    for each in (node, plain):
        each.write("m", "users", [605], rows([3], 4))
        each.write("m", "users", deleted=[606])
    for _ in range(3):
        vectors = node.lookup_on_device("m", {"user": keys}).vectors["user"]
        np.testing.assert_array_equal(vectors, plain.lookup("m", {"user": keys}).vectors["user"])
    until(lambda: set(keys.tolist()) - {605, 606} <= set(cache.keys_of(users)))
    node.write("m", "users", [607], rows([4], 4))
    vectors = node.lookup_on_device("m", {"user": keys}).vectors["user"]
    np.testing.assert_array_equal(vectors[7], rows([4], 4)[0])


def test_deleted_row_is_neither_served_nor_promoted(pair):
    node, _, (cache,) = pair
    users, keys = table_of(node, "users"), np.arange(700, 710)
    node.writer.delete(users, keys[:1], np.full(1, version_now(), np.uint64)).result()
    expected = rows(keys, 4)
    expected[0] = -1
    for _ in range(2):
        vectors = node.lookup_on_device("m", {"user": keys}).vectors["user"]
        np.testing.assert_array_equal(vectors, expected)
        until(lambda: set(keys[1:].tolist()) <= set(cache.keys_of(users)))
        assert keys[0] not in cache.keys_of(users)


@pytest.mark.parametrize("kind", ["wait", "default_then_promote"])
def test_both_miss_policies(open_node, kind):
    miss = {"kind": kind}
    tables = {t.name: {"miss_policy": miss} for t in TABLES}
    node, (cache,) = open_node(gpu={"share": 0.1}, cpu={"share": 0.1}, tables=tables)
    first = node.lookup_on_device("m", {"user": np.array([1, 700, 700, 2000])})
    vectors = first.vectors["user"]
    if kind == "wait":
        np.testing.assert_array_equal(vectors[:3], rows([1, 700, 700], 4))
        assert first.defaulted == 1
    else:
        np.testing.assert_array_equal(vectors[1:], np.full((3, 4), -1))
        assert first.defaulted == 3
    node.writer.flush()
    assert 700 in cache.keys_of(table_of(node, "users"))
    assert 2000 not in cache.keys_of(table_of(node, "users"))
    again = node.lookup_on_device("m", {"user": np.array([1, 700])}, want_source=True)
    np.testing.assert_array_equal(again.vectors["user"], rows([1, 700], 4))
    assert again.sources["user"].tolist() == [Source.GPU] * 2


def test_all_gpus_get_updates_and_share_requests(open_node):
    node, caches = open_node(gpus=3, gpu={"devices": [0, 2], "share": 1.0})
    users = table_of(node, "users")
    assert [cache.number for cache in caches] == [0, 2]
    keys, version = np.array([3, 4]), np.full(2, version_now(), np.uint64)
    node.writer.update(users, keys, np.full((2, 4), 9, np.float32), version).result()
    node.writer.delete(users, keys[1:], version[1:] + 1).result()
    for cache in caches:
        assert cache.keys_of(users) == [k for k in range(HELD) if k != 4]
    for _ in range(2):
        result = node.lookup_on_device("m", {"user": keys})
        np.testing.assert_array_equal(result.vectors["user"], [[9] * 4, [-1] * 4])
    features_and_dense = request_of(np.arange(5, 200), 3)
    for _ in range(4):
        node.predict("m", *features_and_dense)
    assert [cache.pooled for cache in caches] == [2, 2]  # predictions
    assert [len(cache.fetched) for cache in caches] == [1, 1]


@pytest.mark.gpu
def test_all_gpus_of_this_machine(open_node):
    node, _ = open_node(gpus=None, gpu={"devices": list(range(device_count())), "share": 0.5})
    plain, _ = open_node(gpus=None, gpu={"use": "off"}, dense={"provider": "cpu"})
    users, keys = table_of(node, "users"), np.array([3, 4, 900])
    version = np.full(3, version_now(), np.uint64)
    for each in (node, plain):
        new = np.full((3, 4), 9, np.float32)
        each.writer.update(table_of(each, "users"), keys, new, version).result()
        each.writer.delete(table_of(each, "users"), keys[1:2], version[1:2] + 1).result()
    for _ in range(2 * device_count()):
        vectors = node.lookup_on_device("m", {"user": keys}).vectors["user"].get()
        np.testing.assert_array_equal(vectors, [[9] * 4, [-1] * 4, [9] * 4])
        for last in (200, HELD, 2 * HELD):
            features_and_dense = request_of(np.arange(last), 30)
            same(node.predict("m", *features_and_dense), plain.predict("m", *features_and_dense))
    assert node.tiers[1].tier.rows(users) >= 499
    assert cupy().cuda.Device().id == 0


@pytest.mark.gpu
@pytest.mark.parametrize("call", ["lookup", "fetch"])
def test_thread_without_a_cuda_context_looks_up(open_node, call):
    """The driver refuses it, and calls that reuse a stream and memory make no call that would bind one."""
    node, _ = open_node(gpus=None, gpu={"devices": [0], "share": 1.0})
    users, keys = table_of(node, "users"), cupy().arange(100)
    cache, out = node.model("m").on_devices[0].cache, cupy().empty((100, 4), np.float32)

    def look_up():
        if call == "lookup":
            return node.lookup_on_device("m", {"user": keys}).vectors["user"].get()
        part = Part(users, keys, out, None, None, np.arange(100))
        cache.fetch([part], FetchContext())
        return out.get()

    for _ in range(3):
        expected = look_up()
    with ThreadPoolExecutor(1) as thread:
        np.testing.assert_array_equal(thread.submit(look_up).result(), expected)


@pytest.mark.gpu
def test_returned_update_is_visible_on_every_gpu(open_node):
    """And none returns a row that is half of one update and half of another."""
    node, _ = open_node(gpus=None, gpu={"devices": list(range(device_count())), "share": 1.0})
    users, keys, first = table_of(node, "users"), np.arange(100), version_now()

    def update(n: int) -> int:
        new, versions = np.full((100, 4), n, np.float32), np.full(100, first + n, np.uint64)
        node.writer.update(users, keys, new, versions).result()
        return n

    reported = [update(1)]

    def write() -> None:
        for n in range(2, 200):
            reported[0] = update(n)

    def read() -> None:
        while not writing.done():
            least = reported[0]
            vectors = node.lookup_on_device("m", {"user": keys}).vectors["user"].get()
            assert (vectors == vectors[:, :1]).all()
            assert vectors.min() >= least

    with ThreadPoolExecutor(5) as threads:
        writing = threads.submit(write)
        for reading in [threads.submit(read) for _ in range(4)]:
            reading.result()
        writing.result()


def test_network_runs_inside_its_device_context(open_node, monkeypatch):
    """ONNX Runtime changes the thread's current device."""
    inside = []

    class Session:
        def __init__(self, session):
            self._session = session
            self.io_binding = session.io_binding
            inside.append(twin_device.Current.inside)

        def run_with_iobinding(self, *arguments):
            inside.append(twin_device.Current.inside)
            self._session.run_with_iobinding(*arguments)

    monkeypatch.setattr(OnnxModel, "session_on", lambda self, *_: Session(self._open([])))
    node, _ = open_node(dense={"lanes": 1})
    node.predict("m", *request_of(np.arange(200), 5))
    assert inside
    assert set(inside) == {1}


def test_host_lookups_ask_the_gpu_cache_after_the_cpu_cache(open_node):
    node, (cache,) = open_node(gpu={"share": 1.0}, cpu={"share": 0.5})
    keys = np.array([1, 900, 900, 2000])
    result = node.lookup("m", {"user": keys}, want_source=True)
    assert isinstance(result.vectors["user"], np.ndarray)
    np.testing.assert_array_equal(result.vectors["user"][:3], rows(keys[:3], 4))
    assert result.sources["user"].tolist() == [Source.CPU, Source.GPU, Source.GPU, 0]
    assert cache.fetched[0] == 2  # 900 and 2000, each once
    assert cache.space.lent == (3 if COMPILED else 2)


@pytest.mark.parametrize(("fill", "held"), [(0.0, 0), (0.25, 100), (1.0, 400)])
def test_gpu_cache_is_filled_to_the_configured_share(open_node, fill, held):
    node, (cache,) = open_node(gpu={"share": 0.4, "fill": fill}, cpu={"enabled": False})
    assert cache.keys_of(table_of(node, "users")) == list(range(held))


def test_hot_keys_of_the_last_run_are_filled_first(open_node, tmp_path):
    snapshot = {"share": 0.1, "snapshot": {"path": str(tmp_path / "hot"), "interval_s": 1e6}}
    node, _ = open_node(gpus=None, gpu={"use": "off"}, cpu=snapshot)
    hot = np.arange(700, 720)
    for _ in range(3):
        node.lookup("m", {"user": hot})
        node.writer.flush()
    node.close()
    node, (cache,) = open_node(cpu=snapshot, gpu={"share": 0.05})
    assert set(hot.tolist()) <= set(cache.keys_of(table_of(node, "users")))
    node.close()
    node, (cache,) = open_node(cpu=snapshot, gpu={"share": 1.0})
    assert cache.keys_of(table_of(node, "users")) == list(range(HELD))


def test_keys_answered_only_by_the_gpu_are_in_the_hot_keys(open_node, tmp_path):
    """Keys that a GPU answers are not read from the CPU cache, which evicts them in time."""
    path = tmp_path / "hot"
    cpu = {"share": 0.1, "snapshot": {"path": str(path), "interval_s": 1e6}}
    node, (cache,) = open_node(cpu=cpu, gpu={"share": 0.05})
    users, hot = table_of(node, "users"), np.arange(700, 720)
    cache.insert(users, hot, rows(hot, 4), np.ones(20, np.uint64))
    assert not np.isin(hot, node.tiers[0].tier.top_k(users, HELD)[0]).any()
    node.close()
    written = read_hot_keys(path)[users.id][0]
    assert sorted(written[:20].tolist()) == hot.tolist()
    assert (
        len(written) == len(set(written.tolist())) == 120
    )  # the CPU cache's after them, each once
    node, (cache,) = open_node(cpu=cpu, gpu={"share": 0.05})
    assert set(hot.tolist()) <= set(cache.keys_of(table_of(node, "users")))


def test_rows_can_be_evicted_by_version(open_node):
    """For one table; other rows, also a static table's, get no score."""
    tables = {"users": {"gpu_eviction": "version"}, "items": {"gpu_static": True}}
    node, (cache,) = open_node(gpu={"share": 0.5, "eviction": "version"}, tables=tables)
    users, items = table_of(node, "users"), table_of(node, "items")
    assert cache.places[users]["policy"] is EvictionPolicy.SCORE
    version = np.full(2, version_now(), np.uint64)
    node.writer.update(users, np.array([3, 4]), np.ones((2, 4), np.float32), version).result()
    arguments = {table: [s for t, s in cache.scored if t == table] for table in (users, items)}
    assert arguments[users]
    assert all(scores.dtype == np.uint64 for scores in arguments[users])
    np.testing.assert_array_equal(arguments[users][-1], version)
    assert arguments[items]
    assert all(scores is None for scores in arguments[items])
    node, (cache,) = open_node(gpu={"share": 0.5})
    assert all(scores is None for _, scores in cache.scored)


# -- static tables ---------------------------------------------------------------------------------


def test_static_table_is_filled_completely_and_never_changes(open_node):
    node, (cache,) = open_node(
        gpu={"share": 0.1, "fill": 0.0}, cpu={"warm": False}, tables={"users": {"gpu_static": True}}
    )
    users, items = table_of(node, "users"), table_of(node, "items")
    assert cache.places[users]["static"]
    assert cache.keys_of(users) == list(range(HELD))
    assert cache.sealed(users)
    assert not cache.sealed(items)
    assert cache.keys_of(items) == []
    version = np.full(1, version_now(), np.uint64)
    update = node.writer.update(users, np.array([1]), np.zeros((1, 4), np.float32), version)
    with pytest.raises(BadRequest, match="gpu_static: false"):
        update.result()
    with pytest.raises(BadRequest, match="static"):
        node.writer.delete(users, np.array([1]), version).result()
    features_and_dense = request_of(np.arange(HELD + 50), 30)
    node.predict("m", *features_and_dense)
    node.writer.flush()
    assert cache.keys_of(users) == list(range(HELD))


def test_static_table_is_filled_from_the_files_unless_rows_were_written(open_node, monkeypatch):
    """The CPU cache gets the first rows, as many as it holds."""
    fetched = []

    def fetch(self, parts, ctx):
        fetched.append(sum(len(part.missing) for part in parts))
        return fetch_of_store(self, parts, ctx)

    fetch_of_store = RocksDbTier.fetch
    monkeypatch.setattr(RocksDbTier, "fetch", fetch)
    chosen = {"cpu": {"share": 0.1}, "tables": {"users": {"gpu_static": True}}}
    node, (cache,) = open_node(gpu={"share": 0.1}, **chosen)
    users = table_of(node, "users")
    assert cache.keys_of(users) == list(range(HELD))
    assert set(node.tiers[0].tier.top_k(users, HELD)[0].tolist()) <= set(range(200))
    assert 80 < node.tiers[0].tier.size(users) <= 100
    assert not fetched
    path = node.tiers[-1].tier.inner.path
    node.close()
    written, _ = open_node(gpus=None, gpu={"use": "off"}, rocksdb=path)
    written.write("m", "users", [5], np.full((1, 4), 9, np.float32))
    written.close()
    node, (cache,) = open_node(gpu={"share": 0.1}, rocksdb=path, **chosen)
    assert cache.keys_of(table_of(node, "users")) == list(range(HELD))
    assert sum(fetched) == HELD
    vectors = node.lookup_on_device("m", {"user": np.array([5, 6])}).vectors["user"]
    np.testing.assert_array_equal(vectors, [[9] * 4, *rows([6], 4)])


def test_static_tables_are_in_pinned_memory_as_a_whole_if_it_has_room(open_node):
    gpu = {"static": True, "capacity_bytes": 1 << 20, "host_bytes": 1 << 20, "fill": 0.0}
    node, (cache,) = open_node(gpu=gpu, cpu={"warm": False})
    for name in ("users", "items"):
        table = table_of(node, name)
        place = cache.places[table]
        assert (place["static"], place["host_rows"]) == (True, place["rows"])
        assert cache.keys_of(table) == list(range(HELD))
    vectors = node.lookup_on_device("m", {"user": np.array([5, 6])}).vectors["user"]
    np.testing.assert_array_equal(vectors, rows([5, 6], 4))


def test_static_table_with_update_streams_raises_config_error(open_node):
    kafka = {"kafka": {"brokers": "127.0.0.1:1"}}
    with pytest.raises(ConfigError, match=r"m/1/users is static .* gpu_static: false"):
        open_node(tables={"users": {"gpu_static": True}}, updates=kafka)


# -- capacity --------------------------------------------------------------------------------------

AMPLE = [{"share": 1.0}, {"capacity_bytes": 1 << 30}]


@pytest.mark.parametrize("gpu", AMPLE, ids=["share", "bytes"])
def test_tables_that_fit_get_a_slot_for_every_row(open_node, gpu):
    node, (cache,) = open_node(gpu=gpu, tables={"items": {"gpu_share": 0.5}})
    places = [cache.places[table_of(node, name)] for name in ("users", "items")]
    assert [place["load"] for place in places] == [ROOMY_LOAD, 1.0]
    assert [place["rows"] for place in places] == [HELD, HELD // 2]


@pytest.mark.gpu
@pytest.mark.parametrize("gpu", AMPLE, ids=["share", "bytes"])
def test_ample_gpu_holds_every_row(open_node, gpu):
    node, _ = open_node(gpus=None, gpu={"use": "required", **gpu})
    assert [node.tiers[1].tier.rows(table_of(node, t.name)) for t in TABLES] == [HELD, HELD]


# -- closing ---------------------------------------------------------------------------------------


def test_closed_node_gives_all_device_memory_back(open_node, monkeypatch):
    """While the node's object lives; its calls raise Unavailable."""
    caches = twin_device.install(monkeypatch, 2)
    monkeypatch.setattr(twin_device, "install", lambda *_: caches)
    bridges, lanes, released = [], [], []

    class Bridge(twin_device.Bridge):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            bridges.append(self)

    class Lane(NetworkLane):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            lanes.append(self)

    def release(devices):
        assert all(cache.closed for cache in caches)
        released.extend(devices)

    monkeypatch.setattr(gpu_models, "bridge_to_device", Bridge)
    monkeypatch.setattr(gpu_caches, "release_unused", release)
    monkeypatch.setattr("hps.dense.lanes.NetworkLane", Lane)
    node, _ = open_node(gpus=2, gpu={"devices": [0, 1], "share": 0.5})
    features_and_dense = request_of(np.arange(200), 3)
    for _ in range(2):
        node.predict("m", *features_and_dense)
        node.lookup_on_device("m", {"user": np.array([1, 2])})
    node.close()
    assert released == [0, 1]
    assert len(bridges) == 4
    assert all(bridge.released for bridge in bridges)
    assert len(lanes) >= 2
    assert all(lane.session is None and lane.pinned is None and not lane.kept for lane in lanes)
    for call in (
        lambda: node.predict("m", *features_and_dense),
        lambda: node.lookup_on_device("m", {"user": np.array([1, 2])}),
    ):
        with pytest.raises(Unavailable):
            call()


@pytest.mark.gpu
def test_closed_nodes_leave_no_memory_on_a_gpu(open_node):
    """After the first, which loads libraries and kernels that stay."""
    runtime, left = cupy().cuda.runtime, []
    for _ in range(3):
        node, _ = open_node(gpus=None, gpu={"use": "required", "capacity_bytes": 1 << 30})
        for n in (1, 64, 1000):
            node.predict("m", *request_of(np.arange(n), 5))
            node.lookup_on_device("m", {"user": np.arange(n)})
        node.close()
        left.append(runtime.memGetInfo()[0])
    assert left[2] >= left[1] - (2 << 20)


# -- without one -----------------------------------------------------------------------------------


def test_missing_gpu_is_logged(open_node, caplog):
    caplog.set_level(logging.INFO, "hps.node.gpu_caches")
    node, _ = open_node(gpus=None)
    assert [entry.tier.info.name for entry in node.tiers] == ["cpu", "rocksdb"]
    assert "no GPU cache: the GPU cache needs" in caplog.text
    with pytest.raises(BadRequest, match="no GPU cache"):
        node.lookup_on_device("m", {"user": [1]})


@pytest.mark.parametrize(
    ("gpu", "visible", "level"),
    [
        ({}, False, logging.INFO),
        ({"use": "auto"}, False, logging.INFO),
        ({"devices": [0]}, False, logging.WARNING),
        ({}, True, logging.WARNING),
    ],
)
def test_missing_gpu_is_a_warning_if_one_was_expected(
    open_node, caplog, monkeypatch, gpu, visible, level
):
    """By the settings, or because the machine has one, whose package or driver is at fault."""
    monkeypatch.setattr(gpu_caches, "has_gpu", lambda: visible)
    caplog.set_level(logging.INFO, "hps.node.gpu_caches")
    open_node(gpus=None, gpu=gpu)
    (line,) = [each for each in caplog.records if "no GPU cache" in each.message]
    assert line.levelno == level


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"tables": {"users": {"gpu_rows": 0}}}, "table users has no rows there"),
        ({"dense": {"scheduler": False}}, "dense.scheduler is off"),
    ],
)
def test_model_that_workers_cannot_predict_on_the_gpu_is_a_warning(open_node, caplog, given, why):
    open_node(server={"workers": 2}, **given)
    (line,) = [each for each in caplog.records if "workers cannot use" in each.message]
    assert line.levelno == logging.WARNING
    assert why in line.message
    caplog.clear()
    open_node(**given)
    assert "workers cannot use" not in caplog.text


@pytest.mark.parametrize(
    ("given", "starts"),
    [
        ({"dense": {"scheduler": False}}, False),
        ({"tables": {"users": {"gpu_rows": 0}}}, True),
    ],
)
def test_required_gpu_that_workers_cannot_use_is_an_error_unless_it_is_chosen(
    open_node, given, starts
):
    required = {"gpu": {"use": "required", "share": 1.0}, "server": {"workers": 2}}
    if starts:
        open_node(**required, **given)
        return
    with pytest.raises(
        ConfigError, match=r"is required, but workers cannot use .*scheduler is off"
    ):
        open_node(**required, **given)


@pytest.mark.parametrize("provider", ["auto", "cpu"])
def test_network_on_the_cpu_beside_a_gpu_cache_is_a_warning_unless_configured(
    open_node, caplog, monkeypatch, provider
):
    caches = twin_device.install(monkeypatch)
    monkeypatch.setattr(gpu_models, "runs_on_gpu", lambda network: False)
    monkeypatch.setattr(twin_device, "install", lambda *_: caches)
    caplog.set_level(logging.INFO, "hps.node.gpu_models")
    open_node(dense={"provider": provider})
    (line,) = [each for each in caplog.records if "its network runs on the CPU" in each.message]
    assert line.levelno == (logging.INFO if provider == "cpu" else logging.WARNING)


def test_gpu_that_does_not_exist_is_a_warning_under_auto(open_node, caplog):
    open_node(gpus=1, gpu={"devices": [1]})
    assert (
        "GPU 1 of tiers.gpu.devices does not exist: this machine has 1, numbered from 0; rows"
        in caplog.text
    )


def test_required_but_missing_gpu_raises_config_error(open_node, monkeypatch):
    with pytest.raises(ConfigError, match=r"tiers.gpu.use is required, but the GPU cache needs"):
        open_node(gpus=None, gpu={"use": "required"})
    with pytest.raises(
        ConfigError, match=r"is required, but GPU 2 of tiers.gpu.devices does not exist: .* has 2"
    ):
        open_node(gpus=2, gpu={"use": "required", "devices": [0, 2]})


def test_cache_larger_than_gpu_memory_raises_config_error(open_node, monkeypatch):
    monkeypatch.setattr(twin_device.install, "__defaults__", (1, 100_000))
    with pytest.raises(ConfigError, match=r"needs [\d,]+ bytes on GPU 0, and 100,000 are free"):
        open_node(gpu={"share": 1.0, "use": "required"})


def test_full_gpu_that_is_optional_is_not_used(open_node, monkeypatch, caplog):
    monkeypatch.setattr(twin_device.install, "__defaults__", (1, 100_000))
    node, caches = open_node(
        gpu={"share": 1.0, "use": "auto"}, tables={"users": {"gpu_static": True}}
    )
    assert caches == []
    assert [entry.tier.info.name for entry in node.tiers] == ["cpu", "rocksdb"]
    np.testing.assert_array_equal(
        node.lookup("m", {"user": np.array([1, 900])}).vectors["user"], rows([1, 900], 4)
    )
    (record,) = [r for r in caplog.records if "no GPU cache" in r.getMessage()]
    assert record.levelname == "WARNING"
    assert "and 100,000 are free there" in record.getMessage()
    assert "rows are served from the CPU cache" in record.getMessage()


def test_gpu_without_memory_for_a_context_is_not_used(open_node, monkeypatch, caplog):
    def free(device):
        raise GpuUnavailable(f"GPU {device} cannot be used: cudaErrorMemoryAllocation")

    caches = twin_device.install(monkeypatch)
    monkeypatch.setattr(gpu_caches, "free_bytes_on", free)
    monkeypatch.setattr(twin_device, "install", lambda *_: caches)
    node, _ = open_node(gpu={"use": "auto"})
    assert [entry.tier.info.name for entry in node.tiers] == ["cpu", "rocksdb"]
    assert "no GPU cache: GPU 0 cannot be used: cudaErrorMemoryAllocation" in caplog.text
    with pytest.raises(GpuUnavailable):
        open_node(gpu={"use": "required"})


@pytest.mark.parametrize("provider", ["auto", "cpu"])
def test_network_without_memory_for_lanes_is_fed_through_the_host(
    open_node, monkeypatch, caplog, provider
):
    def session_on(self, device, stream):
        raise ModelError("CUDA failure 2: out of memory")

    monkeypatch.setattr(OnnxModel, "session_on", session_on)
    if provider != "auto":
        with pytest.raises(ModelError, match="out of memory"):
            open_node(dense={"provider": provider})
        return
    node, (cache,) = open_node()
    plain, _ = open_node(gpus=None, gpu={"use": "off"})
    features_and_dense = request_of(np.arange(200), 3)
    same(node.predict("m", *features_and_dense), plain.predict("m", *features_and_dense))
    assert cache.pooled == 0
    assert cache.keys_of(table_of(node, "users"))
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert any("no memory for the network's lanes" in line for line in warnings)


@pytest.mark.parametrize("use", ["auto", "required"])
def test_failed_allocation_closes_the_caches_opened_before(open_node, monkeypatch, use):
    caches = twin_device.install(monkeypatch, 2)
    monkeypatch.setattr(twin_device, "install", lambda *_: caches)

    def add_table(self, table, rows, **how):
        if self.number == 1:
            raise GpuUnavailable("another process was faster")
        self.places[table] = {"rows": rows, **how}

    monkeypatch.setattr(twin_device.Cache, "add_table", add_table)
    if use == "required":
        with pytest.raises(GpuUnavailable, match="another process was faster"):
            open_node(gpus=2, gpu={"devices": [0, 1], "use": use})
    else:
        node, _ = open_node(gpus=2, gpu={"devices": [0, 1], "use": use})
        assert [entry.tier.info.name for entry in node.tiers] == ["cpu", "rocksdb"]
    assert [cache.closed for cache in caches] == [True, True]


def test_pinned_memory_is_checked_before_any_allocation(open_node, monkeypatch):
    caches = twin_device.install(monkeypatch, 2)
    monkeypatch.setattr(twin_device, "install", lambda *_: caches)
    monkeypatch.setattr("hps.node.gpu_caches.free_host_bytes", lambda: 50_000)
    gpu = {"devices": [0, 1], "share": 1.0, "host_bytes": 40_000}
    with pytest.raises(
        ConfigError, match=r"pinned host memory .* 50,000 are available .* at most 23,750"
    ):
        open_node(gpus=2, gpu=gpu)
    assert caches == []
    open_node(gpus=2, gpu={**gpu, "host_bytes": 23_750})


def test_status_shows_the_gpu_cache(open_node):
    node, _ = open_node(gpu={"share": 0.5, "host_bytes": 1 << 14})
    gpu = node.status()["tiers"][1]
    assert (gpu["name"], gpu["kind"], gpu["devices"]) == ("gpu", "cache", [0])
    assert gpu["bytes"] > 0
    assert 0 < gpu["pinned_host_bytes"] <= 1 << 14
    table = node.status()["models"][0]["tables"][0]
    assert table["capacity_rows"]["gpu"] == 500


def test_cpu_network_gets_vectors_from_the_cpu_cache(open_node, monkeypatch):
    caches = twin_device.install(monkeypatch)
    monkeypatch.setattr("hps.node.gpu_models.runs_on_gpu", lambda network: not network.on_host)
    monkeypatch.setattr(twin_device, "install", lambda *_: caches)
    node, (cache,) = open_node()
    plain, _ = open_node(gpus=None, gpu={"use": "off"})
    features_and_dense = request_of(np.arange(200), 3)
    same(node.predict("m", *features_and_dense), plain.predict("m", *features_and_dense))
    assert cache.pooled == 0


def test_memory_of_each_working_gpu_is_reported(open_node, monkeypatch):
    monkeypatch.setattr(gpu_memory, "_REFRESH_S", 0.0)
    node, _ = open_node(gpus=2, gpu={"devices": [0, 1], "share": 0.5})

    def reported():
        return dict(node.metrics.numbers()[GPU_MEMORY_TOTAL])

    until(lambda: reported() == {("0", "GPU-0"): 1 << 34, ("1", "GPU-1"): 1 << 34})

    def look(device):
        if device == 1:
            raise RuntimeError("fell off the bus")
        return GpuMemoryUsage(device, "GPU-0", 1, 2)

    monkeypatch.setattr(gpu_memory, "read_memory", look)
    until(lambda: reported() == {("0", "GPU-0"): 2})
