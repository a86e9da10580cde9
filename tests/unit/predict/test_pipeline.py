"""InferencePipeline: broadcast, top_k, outputs, errors, and the threads that do the work."""

import threading
import time
from concurrent.futures import CancelledError, Future

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hps.config.model_schema import DenseSpec, TensorSpec
from hps.dense.base import NetworkTensor
from hps.errors import BadRequest, DeadlineExceeded, DenseModelError, ModelError, Unavailable
from hps.lookup.base import Feature, LookupModel
from hps.lookup.engine import LookupEngine
from hps.predict.pipeline import InferencePipeline, ModelNetwork, top_k
from hps.threads import BoundedThreadPool
from hps.tiers.base import TierInfo
from hps.tiers.chain import TierChain
from hps.types import EmbeddingTable, JaggedKeys, LookupRequest, PredictRequest, Source
from tests.support.gated_tier import GatedTier
from tests.support.memory_tier import MemoryTier
from tests.support.waiting import until

USERS = EmbeddingTable.make("users", 2, default=-1.0)
ITEMS = EmbeddingTable.make("items", 3, default=-1.0)
TAGS = EmbeddingTable.make("tags", 2, dtype=np.float16)
FEATURES = {
    "user": Feature("user", USERS, context=True),
    "item": Feature("item", ITEMS),
    "tags": Feature("tags", TAGS, pooling="none", hotness=2),
}
SPEC = DenseSpec(
    inputs=[
        TensorSpec(name="price", shape=[-1]),
        TensorSpec(name="now", shape=[-1, 2], datatype="FP32", context=True),
    ],
    embeddings={"item": "item_vector"},
    outputs=[TensorSpec(name="ctr", shape=[-1, 1]), TensorSpec(name="all", shape=[-1, 12])],
    ranking_output="ctr",
)


class Network:
    """A network with outputs ctr = price + the item's first value, and all = every input, concatenated."""

    inputs = (
        NetworkTensor("price", "FP32", (-1,)),
        NetworkTensor("now", "FP32", (-1, 2)),
        NetworkTensor("user", "FP32", (-1, 2)),
        NetworkTensor("item_vector", "FP32", (-1, 3)),
        NetworkTensor("tags", "FP32", (-1, 2, 2)),
    )
    outputs = (NetworkTensor("ctr", "FP32", (-1, 1)), NetworkTensor("all", "FP32", (-1, 12)))
    inline = True
    runs = 0
    error = None
    fed = None
    requested = None

    def predict(self, inputs, outputs=None, deadline=None):
        self.runs += 1
        self.fed, self.requested = inputs, outputs
        self.thread = threading.current_thread().name
        if self.error:
            raise self.error
        for tensor in self.inputs:
            array = inputs[tensor.name]
            assert array.flags.c_contiguous
            assert array.dtype == tensor.dtype, tensor.name
            assert array.shape[1:] == tensor.shape[1:], tensor.name
        flat = [inputs[t.name].reshape(len(inputs["price"]), -1) for t in self.inputs]
        joined = np.concatenate(flat, axis=1)
        ctr = inputs["price"].reshape(-1, 1) + inputs["item_vector"][:, :1]
        results = {"ctr": ctr, "all": joined}
        return {name: results[name] for name in outputs or results}

    def runs_inline(self, batch):
        return self.inline

    def close(self):
        pass


class Recorder:
    """A DenseMeter that keeps what it is passed."""

    def __init__(self):
        self.seconds, self.broken, self.scores = [], {}, {}

    def ran(self, seconds):
        self.seconds.append(seconds)

    def scored(self, output, values):
        assert np.isfinite(values).all()
        self.scores[output] = values.ravel().tolist()

    def not_finite(self, output, values):
        self.broken[output] = self.broken.get(output, 0) + values


class Setup:
    """A pipeline over a cache with keys 0 to 49, a store with 0 to 99, and `Network`."""

    def __init__(self, spec=SPEC, features=FEATURES, network=None, workers=None):
        self.cache = MemoryTier(TierInfo("cpu", Source.CPU, cache=True))
        self.store = GatedTier()
        for tier, keys in ((self.cache, range(50)), (self.store, range(100))):
            inserted = np.array(keys, np.int64)
            for table in (USERS, ITEMS, TAGS):
                rows = np.repeat(inserted[:, None], table.dim, axis=1).astype(table.dtype)
                tier.insert(table, inserted, rows, np.ones(len(inserted), np.uint64))
        self.workers = workers or BoundedThreadPool(2, 8, name="test", setting="tiers.lookup_queue")
        self.network = network or Network()
        self.recorder = Recorder()
        tables = {t.name: t for t in (USERS, ITEMS, TAGS)}
        model = LookupModel("m", 1, tables, features, max_batch_size=100)
        self.engine = LookupEngine(
            model, TierChain([self.cache]), TierChain([self.store]), self.workers
        )
        network = ModelNetwork("m", spec, self.network, self.recorder)
        self.pipeline = InferencePipeline(network, self.engine, self.workers)


@pytest.fixture
def setup():
    setup = Setup()
    yield setup
    setup.workers.close()


def request(batch=3, *, user=None, now=None, first=1, **options):
    item = np.arange(first, first + batch)
    features = {
        "user": JaggedKeys.dense(user if user is not None else [7]),
        "item": JaggedKeys.dense(item),
        "tags": JaggedKeys.dense(np.repeat(item, 2).reshape(batch, 2)),
    }
    dense = {
        "price": np.linspace(0, 1, batch, dtype=np.float32),
        "now": np.ones((1, 2), np.float32) if now is None else now,
    }
    return PredictRequest(features, dense, **options)


def test_context_is_fetched_once_and_broadcast(setup):
    result = setup.pipeline.predict(request(3))
    assert list(result.outputs) == ["ctr", "all"]
    np.testing.assert_array_equal(setup.network.fed["user"], np.full((3, 2), 7.0))
    np.testing.assert_array_equal(setup.network.fed["now"], np.ones((3, 2)))
    np.testing.assert_array_equal(setup.network.fed["tags"][:, 1, 0], [1, 2, 3])
    full = setup.pipeline.predict(request(3, user=[7, 7, 7], now=np.ones((3, 2), np.float32)))
    for name, values in result.outputs.items():
        np.testing.assert_array_equal(values, full.outputs[name])
    assert setup.recorder.seconds


def test_weighted_jagged_context_is_pooled(setup):
    sent = request(2)
    bag = JaggedKeys(np.array([1, 2, 3]), 1, np.array([0, 3]), np.array([1, 0.5, 2], np.float32))
    sent.features["user"] = bag
    setup.pipeline.predict(sent)
    np.testing.assert_array_equal(setup.network.fed["user"], np.full((2, 2), 8.0))


def test_requested_outputs_come_in_the_models_order(setup):
    assert list(setup.pipeline.predict(request(outputs=("all", "ctr"))).outputs) == ["ctr", "all"]
    assert list(setup.pipeline.predict(request(outputs=("all",))).outputs) == ["all"]
    assert setup.network.requested == ("all",)
    with pytest.raises(BadRequest, match="no output 'al'; did you mean 'all'"):
        setup.pipeline.submit(request(outputs=("al",)))


def test_top_k_cuts_every_output(setup):
    whole = setup.pipeline.predict(request(5)).outputs
    result = setup.pipeline.predict(request(5, top_k=2)).outputs
    assert result["top_k_index"].tolist() == [4, 3]
    for name in ("ctr", "all"):
        np.testing.assert_array_equal(result[name], whole[name][[4, 3]])
    only = setup.pipeline.predict(request(5, top_k=2, outputs=("all", "top_k_index"))).outputs
    assert list(only) == ["all", "top_k_index"]
    assert setup.network.requested == ("all", "ctr")
    assert len(setup.pipeline.predict(request(2, top_k=9)).outputs["top_k_index"]) == 2


@pytest.mark.parametrize("k", [0, -1])
def test_top_k_below_one_is_rejected(setup, k):
    with pytest.raises(BadRequest, match=f"top_k must be at least 1, got {k}"):
        setup.pipeline.submit(request(top_k=k))


@settings(deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 1.0, -1.0, np.nan, np.inf, -np.inf]), max_size=8),
    st.integers(1, 9),
)
def test_top_k_sorts_descending_with_nan_last(scores, k):
    expected = sorted(
        range(len(scores)),
        key=lambda i: (np.isnan(scores[i]), -scores[i] if not np.isnan(scores[i]) else 0, i),
    )
    assert top_k(np.array(scores, np.float32), k).tolist() == expected[:k]


def test_top_k_sorts_unsigned_and_signed_integers():
    assert top_k(np.array([1, 200, 3], np.uint8), 3).tolist() == [1, 2, 0]
    assert top_k(np.array([[-5], [7]], np.int64), 1).tolist() == [1]


def test_empty_batch_gives_empty_outputs(setup):
    result = setup.pipeline.predict(request(0, top_k=3))
    assert {name: values.shape for name, values in result.outputs.items()} == {
        "ctr": (0, 1),
        "all": (0, 12),
        "top_k_index": (0,),
    }
    assert setup.network.runs == 0


def test_sources_defaults_and_nan_scores_are_reported(setup):
    sent = request(2, first=99, want_source=True)
    sent.dense["price"][0] = np.nan
    result = setup.pipeline.predict(sent)
    assert result.sources["item"].tolist() == [Source.ROCKSDB, Source.DEFAULT]
    assert result.defaulted == 3  # one item, once as itself and twice in tags
    assert np.isnan(result.outputs["ctr"][0, 0])
    assert setup.recorder.broken == {"ctr": 1, "all": 1}
    # Only outputs with one number per sample are recorded, without NaN.
    assert setup.recorder.scores == {"ctr": [float(result.outputs["ctr"][1, 0])]}


# -- invalid requests and errors -----------------------------------------------------------------


def changed(**tensors):
    """Return a function that sets tensors of a request, or removes those that are None."""

    def change(sent):
        for name, value in tensors.items():
            group = sent.features if name in FEATURES or name == "usr" else sent.dense
            if value is None:
                del group[name]
            else:
                group[name] = value
        return sent

    return change


KEYS = JaggedKeys.dense
INVALID_REQUESTS = {
    "missing feature": (changed(item=None), "'m' misses feature 'item'"),
    "missing input": (changed(price=None, now=None), "'m' misses input 'price', 'now'"),
    "unknown feature": (changed(usr=KEYS([1])), "no feature 'usr'; did you mean 'user'"),
    "unknown input": (changed(prize=np.ones(3)), "no input 'prize'; did you mean 'price'"),
    "type": (changed(price=np.array(["a"] * 3)), "'price' is FP32, got <U1"),
    "rank": (changed(price=np.ones((3, 1))), r"'price' has shape \[-1\], got \[3, 1\]"),
    "size": (changed(now=np.ones((1, 3))), r"'now' has shape \[-1, 2\], got \[1, 3\]"),
    "scalar": (changed(price=np.float32(1)), r"'price' has shape \[-1\], got \[\]"),
    "batch of input": (changed(price=np.ones(2)), "'item' has 3, 'price' has 2"),
    "one is not context": (changed(price=np.ones(1)), "'item' has 3, 'price' has 1"),
    "batch of features": (changed(item=KEYS([1, 2])), "differ: 'item' has 2, 'tags' has 3"),
    "context": (changed(user=KEYS([1, 2])), "differ: 'user' has 2, 'item' has 3"),
    "hotness": (changed(tags=KEYS([1, 2, 3])), "'tags' takes 2 keys per sample"),
    "jagged rows": (
        changed(tags=JaggedKeys(np.arange(6), 3, np.array([0, 2, 4, 6]))),
        "'tags' is not pooled and feeds a network, .* 2 keys per sample; send it without offsets",
    ),
}


@pytest.mark.parametrize("case", INVALID_REQUESTS)
def test_invalid_request_is_rejected(setup, case):
    change, message = INVALID_REQUESTS[case]
    with pytest.raises(BadRequest, match=message):
        setup.pipeline.submit(change(request(3)))
    assert setup.network.runs == 0


def test_batch_over_the_models_limit_is_rejected(setup):
    with pytest.raises(BadRequest, match="batch-size must be <= 100 for 'm', got 101"):
        setup.pipeline.submit(request(101))


def test_float64_input_is_converted_to_float32(setup):
    sent = request(3)
    sent.dense["price"] = [0.1, 0.2, 0.3]
    expected = np.array([0.1, 0.2, 0.3], np.float32)
    setup.pipeline.predict(sent)
    np.testing.assert_array_equal(setup.network.fed["price"], expected)


def test_network_error_fails_only_its_request(setup):
    setup.network.error = DenseModelError("no")
    with pytest.raises(DenseModelError):
        setup.pipeline.predict(request(3))
    with pytest.raises(DenseModelError):
        setup.pipeline.submit(request(3, first=60)).result(60)
    setup.network.error = None
    assert setup.pipeline.predict(request(3)).outputs


def test_output_with_a_wrong_batch_is_a_dense_model_error(setup, monkeypatch):
    monkeypatch.setattr(
        setup.network, "predict", lambda *_: {"ctr": np.ones((2, 1)), "all": np.ones((3, 12))}
    )
    with pytest.raises(DenseModelError, match=r"'ctr' has shape \[2, 1\] for a batch of 3"):
        setup.pipeline.predict(request(3))


def test_top_k_over_a_vector_output_is_rejected():
    spec = SPEC.model_copy(update={"ranking_output": None, "outputs": SPEC.outputs[::-1]})
    setup = Setup(spec)
    with pytest.raises(BadRequest, match=r"output 'all' has \[12\]; name another"):
        setup.pipeline.predict(request(3, top_k=1))
    setup.workers.close()


# -- wiring --------------------------------------------------------------------------------------


def assert_rejected(message, **changes):
    """Check that a pipeline with ``changes`` of its specification raises ModelError."""
    features = changes.pop("features", FEATURES)
    workers = BoundedThreadPool(1, 1, name="test", setting="s")
    with pytest.raises(ModelError, match=message):
        Setup(SPEC.model_copy(update=changes), features, workers=workers)
    workers.close()


def test_mismatching_wiring_is_a_model_error():
    assert_rejected(
        "names feature 'x'; the features are user, item, tags", embeddings={"x": "user"}
    )
    assert_rejected("input 'item', the network has", embeddings={})
    assert_rejected("feeds network input 'user' twice", embeddings={"item": "user"})
    assert_rejected("ranking_output is 'x'; the outputs are ctr, all", ranking_output="x")
    assert_rejected(r"ranking_output 'all' has shape \[-1, 12\]", ranking_output="all")
    loose = FEATURES | {"tags": Feature("tags", TAGS, pooling="none")}
    assert_rejected("'tags' is not pooled .* must give its hotness", features=loose)


# -- threads and deadlines -----------------------------------------------------------------------


def test_resident_rows_and_fast_network_are_answered_inline(setup):
    future = setup.pipeline.submit(request(3))
    assert future.done()
    assert setup.network.thread == threading.current_thread().name


def test_slow_network_runs_on_a_worker(setup):
    setup.network.inline = False
    for first in (1, 60):
        future = setup.pipeline.submit(request(3, first=first))
        assert isinstance(future, Future)
        assert future.result(60).outputs["ctr"].shape == (3, 1)
        assert setup.network.thread.startswith("hps-test")


@pytest.mark.parametrize("inline", [True, False])
def test_slow_store_does_not_block_the_caller(setup, inline):
    setup.network.inline = inline
    setup.store.gate.clear()
    future = setup.pipeline.submit(request(3, first=60))
    assert not future.done()
    setup.store.gate.set()
    assert future.result(60).outputs["ctr"][0, 0] == 60
    assert setup.network.thread.startswith("hps-test")


def test_network_error_after_a_store_lookup_reaches_the_future(setup):
    setup.network.error = ZeroDivisionError("bug")
    for inline in (True, False):
        setup.network.inline = inline
        with pytest.raises(ZeroDivisionError):
            setup.pipeline.submit(request(3, first=60)).result(60)


def test_deadline_that_passes_in_the_store_skips_the_network(setup):
    setup.store.gate.clear()
    deadline = time.monotonic() + 0.5
    future = setup.pipeline.submit(request(3, first=60, deadline=deadline))
    until(lambda: time.monotonic() > deadline)
    setup.store.gate.set()
    with pytest.raises(DeadlineExceeded, match="before the dense model could run"):
        future.result(60)
    assert setup.network.runs == 0


def test_full_queue_after_a_store_lookup_fails_the_future():
    workers = BoundedThreadPool(1, 1, name="test", setting="tiers.lookup_queue")
    setup = Setup(workers=workers)
    setup.network.inline = False
    setup.store.gate.clear()
    first = setup.pipeline.submit(request(1, first=60))
    while workers.waiting:
        time.sleep(0.001)
    second = setup.pipeline.submit(request(1, first=61))
    setup.store.gate.set()
    # The first one's rows arrived while the second held the only slot in the queue.
    with pytest.raises(Unavailable, match="overloaded"):
        first.result(60)
    assert second.result(60).outputs
    workers.close()


def test_cancelled_request_does_not_run_the_network(setup):
    setup.store.gate.clear()
    future = setup.pipeline.submit(request(3, first=60))
    future.cancel()
    setup.store.gate.set()
    with pytest.raises(CancelledError):
        future.result(60)
    setup.workers.close()
    assert setup.network.runs == 0


def test_lookup_and_prediction_use_the_same_rows(setup):
    sent = request(3)
    rows = setup.engine.lookup(LookupRequest(sent.features)).vectors
    setup.pipeline.predict(sent)
    np.testing.assert_array_equal(setup.network.fed["item_vector"], rows["item"])
