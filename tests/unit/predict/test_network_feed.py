"""Padded features of predictions: vectors, masks and lengths as the network takes them."""

import numpy as np
import pytest

from hps.config.model_schema import DenseSpec, TensorSpec
from hps.dense.base import NetworkTensor
from hps.errors import BadRequest, ModelError
from hps.lookup.base import Feature, LookupModel
from hps.lookup.batching import BatchLimits
from hps.lookup.engine import LookupEngine
from hps.predict.batched_pipeline import BatchedPipeline
from hps.predict.network_feed import NetworkFeed
from hps.predict.pipeline import InferencePipeline, ModelNetwork
from hps.threads import BoundedThreadPool
from hps.tiers.base import TierInfo
from hps.tiers.chain import TierChain
from hps.types import EmbeddingTable, JaggedKeys, PredictRequest, Source
from tests.support.memory_tier import MemoryTier

ITEMS = EmbeddingTable.make("items", 2, default=-1.0)
HALVES = EmbeddingTable.make("halves", 3, dtype=np.float16, default=-1.0)
MOST = 3
SPEC = DenseSpec(
    masks={"history": "mask"},
    lengths={"history": "length"},
    outputs=[TensorSpec(name="sum", shape=[-1])],
)


def features_of(**history):
    options = {"pooling": "none", "max_length": MOST, "keys_of": "history"} | history
    return {
        "item": Feature("item", ITEMS),
        "history.a": Feature("history.a", ITEMS, **options),
        "history.b": Feature("history.b", HALVES, **options),
    }


class Network:
    """``sum``: of all inputs of a sample."""

    outputs = (NetworkTensor("sum", "FP32", (-1,)),)

    def __init__(self, mask="FP32", length="INT64", size=MOST):
        self.inputs = (
            NetworkTensor("item", "FP32", (-1, 2)),
            NetworkTensor("history.a", "FP32", (-1, size, 2)),
            NetworkTensor("history.b", "FP32", (-1, MOST, 3)),
            NetworkTensor("mask", mask, (-1, size)),
            NetworkTensor("length", length, (-1,)),
        )
        self.fed = None

    def predict(self, inputs, outputs=None, deadline=None):
        self.fed = inputs
        assert inputs.keys() == {tensor.name for tensor in self.inputs}
        batch = len(inputs["item"])
        for tensor in self.inputs:
            array = inputs[tensor.name]
            assert array.flags.c_contiguous
            assert array.dtype == tensor.dtype
            assert array.shape[0] == batch
            assert array.shape[1:] in (tensor.shape[1:], (MOST, *tensor.shape[2:]))
        return {
            "sum": sum(a.reshape(batch, -1).sum(axis=1, dtype=np.float32) for a in inputs.values())
        }

    def runs_inline(self, batch):
        return True

    def close(self):
        pass


class Setup:
    """A pipeline over a cache with keys 0 to 99; row k is k in all values."""

    def __init__(self, network=None, spec=SPEC, max_keys=1 << 31, **history):
        cache = MemoryTier(TierInfo("cpu", Source.CPU, cache=True))
        keys = np.arange(100)
        for table in (ITEMS, HALVES):
            rows = np.repeat(keys[:, None], table.dim, axis=1).astype(table.dtype)
            cache.insert(table, keys, rows, np.ones(100, np.uint64))
        self.workers = BoundedThreadPool(1, 8, name="test", setting="tiers.lookup_queue")
        self.network = network or Network()
        tables = {table.name: table for table in (ITEMS, HALVES)}
        model = LookupModel("m", 1, tables, features_of(**history), max_keys=max_keys)
        store = MemoryTier(TierInfo("store", Source.ROCKSDB))
        engine = LookupEngine(model, TierChain([cache]), store, self.workers)
        self.pipeline = InferencePipeline(
            ModelNetwork("m", spec, self.network), engine, self.workers
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.workers.close()


def request(history, item=None, **options):
    keys = history if isinstance(history, JaggedKeys) else JaggedKeys.from_lists(history)
    items = JaggedKeys.dense(np.arange(keys.batch) if item is None else item)
    return PredictRequest({"item": items, "history.a": keys, "history.b": keys}, **options)


def expected_sum(item, history, most=MOST, first=False):
    """The network's output for one sample, of known keys."""
    kept = history[:most] if first else history[-most:]
    return 2 * item + 5 * sum(kept) + 2 * len(kept)


@pytest.mark.parametrize("mask", ["BOOL", "INT32", "INT64", "FP16", "FP32"])
@pytest.mark.parametrize("length", ["INT32", "INT64", "FP32"])
def test_network_gets_vectors_mask_and_lengths_in_its_types(mask, length):
    samples = [[5], [1, 2, 3], [], [8, 9]]
    with Setup(Network(mask, length)) as setup:
        found = setup.pipeline.predict(request(samples)).outputs["sum"]
        fed = setup.network.fed
    assert found.tolist() == [expected_sum(i, sample) for i, sample in enumerate(samples)]
    assert fed["mask"].astype(int).tolist() == [[1, 0, 0], [1, 1, 1], [0, 0, 0], [1, 1, 0]]
    assert fed["length"].tolist() == [1, 3, 0, 2]
    assert fed["history.a"][3].tolist() == [[8, 8], [9, 9], [0, 0]]
    assert fed["history.b"][3].tolist() == [[8] * 3, [9] * 3, [0] * 3]


def test_the_same_number_of_keys_needs_no_offsets():
    keys = JaggedKeys.dense([[1, 2], [3, 4]])
    with Setup() as setup:
        found = setup.pipeline.predict(request(keys)).outputs["sum"]
    assert found.tolist() == [expected_sum(0, [1, 2]), expected_sum(1, [3, 4])]


def test_a_key_without_a_row_is_not_padding():
    with Setup() as setup:
        answer = setup.pipeline.predict(request([[700], []]))
        assert setup.network.fed["history.a"].tolist() == [[[-1, -1], [0, 0], [0, 0]], [[0, 0]] * 3]
    assert answer.defaulted == 2  # in both tables


@pytest.mark.parametrize("samples", [[[], []], []], ids=["no key", "no sample"])
def test_histories_without_keys_are_padding(samples):
    with Setup() as setup:
        found = setup.pipeline.predict(request(samples)).outputs["sum"]
        fed = setup.network.fed
    assert found.tolist() == [expected_sum(i, []) for i in range(len(samples))]
    if samples:
        assert not fed["history.a"].any()
        assert not fed["mask"].any()
    else:
        assert fed is None  # the network does not run


@pytest.mark.parametrize("truncation", ["keep_first", "keep_last"])
def test_longer_histories_keep_one_end(truncation):
    samples = [[1, 2, 3, 4, 5], [6], [7, 8, 9, 10]]
    with Setup(truncation=truncation) as setup:
        answer = setup.pipeline.predict(request(samples, want_source=True))
    first = truncation == "keep_first"
    expected = [expected_sum(i, sample, first=first) for i, sample in enumerate(samples)]
    assert answer.outputs["sum"].tolist() == expected
    cut = [2, 2, 2, 0, 0, 2, 2, 2, 2, 0] if first else [0, 0, 2, 2, 2, 2, 0, 2, 2, 2]
    assert answer.sources["history.a"].tolist() == cut
    assert answer.sources["history.b"].tolist() == cut
    assert answer.sources["item"].tolist() == [2, 2, 2]


def test_longer_histories_are_rejected_by_default():
    with Setup() as setup:
        with pytest.raises(BadRequest, match=r"'history' takes at most 3 keys .*, sample 1 has 4"):
            setup.pipeline.submit(request([[1], [1, 2, 3, 4]]))
        assert setup.network.fed is None


def test_one_history_is_broadcast_over_the_candidates():
    with Setup(context=True) as setup:
        found = setup.pipeline.predict(request([[4, 5]], item=[1, 2, 3])).outputs["sum"]
        assert setup.network.fed["mask"].tolist() == [[1, 1, 0]] * 3
        assert setup.network.fed["length"].tolist() == [2, 2, 2]
    assert found.tolist() == [expected_sum(i, [4, 5]) for i in (1, 2, 3)]


def test_padding_counts_towards_the_limit_of_keys():
    with Setup(context=True, max_keys=60) as setup:
        assert setup.pipeline.predict(request([[1]], item=range(10))).outputs["sum"].shape == (10,)
        with pytest.raises(BadRequest, match="at most 60 keys, and has 66 when padded"):
            setup.pipeline.submit(request([[1]], item=range(11)))


def test_batched_predictions_equal_single_ones():
    with Setup(truncation="keep_last") as setup:
        many = [request([[i, i + 1, i + 2, i + 3][: i % 5]], want_source=i == 4) for i in range(9)]
        single = [setup.pipeline.predict(each) for each in many]
        limits = BatchLimits(100, 1000, delay_s=0.2)
        batched = BatchedPipeline(setup.pipeline, setup.pipeline.lookup.features, limits)
        found = [future.result(60) for future in [batched.submit(each) for each in many]]
        assert len(setup.network.fed["item"]) == 9
    for mine, theirs in zip(found, single, strict=True):
        assert mine.outputs["sum"].tobytes() == theirs.outputs["sum"].tobytes()
    assert found[4].sources["history.a"].tolist() == single[4].sources["history.a"].tolist()


def test_one_long_history_fails_alone_in_a_batch():
    with Setup() as setup:
        limits = BatchLimits(100, 1000, delay_s=0.2)
        batched = BatchedPipeline(setup.pipeline, setup.pipeline.lookup.features, limits)
        futures = [batched.submit(request([[1] * n])) for n in (1, 2, 4, 3)]
        with pytest.raises(BadRequest, match="sample 0 has 4"):
            futures[2].result(60)
        found = [futures[i].result(60).outputs["sum"].tolist() for i in (0, 1, 3)]
    assert found == [[expected_sum(0, [1] * n)] for n in (1, 2, 3)]


MISFITS = {
    "mask type": (
        {"network": Network(mask="FP64")},
        "input 'mask' is BOOL or FP16 or FP32 or INT32 or INT64 in model.yaml, FP64 in the network",
    ),
    "lengths type": ({"network": Network(length="BOOL")}, "input 'length' is INT64 .* BOOL in the"),
    "length": (
        {"network": Network(size=4)},
        r"'history.a' has shape \[-1, 3, 2\] in model.yaml, \[-1, 4, 2\] in the network",
    ),
    "unfed mask": (
        {"spec": SPEC.model_copy(update={"masks": {}})},
        r"feeds nothing to network input 'mask' .* dense.masks",
    ),
    "unknown mask": (
        {"spec": SPEC.model_copy(update={"masks": {"history": "maks"}})},
        "names input 'maks', the network has item, history.a, history.b, mask, length",
    ),
    "mask of no sequence": (
        {"spec": SPEC.model_copy(update={"masks": {"item": "mask"}})},
        "dense.masks names feature 'item', which has no max_length in model.yaml",
    ),
    "fed twice": (
        {"spec": SPEC.model_copy(update={"lengths": {"history": "mask"}})},
        "feeds network input 'mask' twice",
    ),
}


@pytest.mark.parametrize("case", MISFITS)
def test_network_that_takes_something_else_is_rejected(case):
    change, message = MISFITS[case]
    network, spec = change.get("network", Network()), change.get("spec", SPEC)
    with pytest.raises(ModelError, match=message):
        NetworkFeed("m", spec, features_of(), network)


def test_mask_of_another_shape_is_rejected():
    network = Network()
    wide = NetworkTensor("mask", "BOOL", (-1, 1, MOST))
    network.inputs = tuple(wide if t.name == "mask" else t for t in network.inputs)
    message = r"'mask' has shape \[-1, 3\] in model.yaml, \[-1, 1, 3\] in the network"
    with pytest.raises(ModelError, match=message):
        NetworkFeed("m", SPEC, features_of(), network)


@pytest.mark.parametrize("size", [-1, MOST])
def test_network_may_leave_the_length_variable(size):
    with Setup(Network(size=size)) as setup:
        found = setup.pipeline.predict(request([[5]])).outputs["sum"]
    assert found.tolist() == [expected_sum(0, [5])]
