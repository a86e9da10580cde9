"""`hps.torch.Embedding`: equal to ``torch.nn.Embedding`` of the same rows."""

from __future__ import annotations

import copy
import pickle
import threading

import numpy as np
import pytest

import hps
from hps.errors import BadRequest, NotFound, Unavailable, Unsupported
from hps.layers.table_lookup import TableReference
from hps.lookup.max_norm import scale_to_norm
from tests.support.pytorch import hps_torch, torch


def reference(rows, table="plain"):
    return torch.nn.Embedding.from_pretrained(torch.from_numpy(rows[table]))


@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 5), (2, 3, 4), (4, 0)], ids=str)
def test_rows_equal_those_of_torch(node, rows, shape):
    keys = torch.randint(0, 100, shape)
    found = hps_torch.Embedding(node, "m", "plain")(keys)
    assert found.dtype == torch.float32
    assert found.shape == (*shape, 8)
    assert torch.equal(found, reference(rows)(keys))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint64], ids=str)
def test_every_integer_dtype_of_keys_is_taken(node, rows, dtype):
    keys = torch.tensor([[3, 1], [4, 1]])
    found = hps_torch.Embedding(node, "m", "plain")(keys.to(dtype))
    assert torch.equal(found, reference(rows)(keys))


def test_keys_that_are_not_contiguous_are_read_in_their_order(node, rows):
    keys = torch.arange(20).reshape(4, 5).T
    found = hps_torch.Embedding(node, "m", "plain")(keys)
    assert torch.equal(found, reference(rows)(keys))


def test_absent_keys_get_the_default(node):
    found = hps_torch.Embedding(node, "m", "plain")(torch.tensor([-1, 100, 2**62]))
    assert (found == 0.5).all()


def test_float16_tables_give_float16(node, rows):
    keys = torch.arange(100)
    found = hps_torch.Embedding(node, "m", "half")(keys)
    assert found.dtype == torch.float16
    assert torch.equal(found.float(), reference(rows, "half")(keys))


class RecordingNode:
    """A node that keeps the arrays of its last lookup, and may hand out read-only ones."""

    def __init__(self, node, writeable=True):
        self.table, self.model, self.models = node.table, node.model, node.models
        self._node, self._writeable = node, writeable

    def lookup(self, model, features, **options):
        self.keys = features["plain"]
        found = self._node.lookup(model, features, **options)
        self.vectors = found.vectors["plain"]
        self.vectors.flags.writeable = self._writeable
        return found


def test_keys_and_rows_are_not_copied(node):
    recording, keys = RecordingNode(node), torch.arange(6).reshape(2, 3)
    found = hps_torch.Embedding(recording, "m", "plain")(keys)
    assert np.shares_memory(recording.keys, keys.numpy())
    assert np.shares_memory(recording.vectors, found.numpy())


def test_read_only_rows_are_copied(node, rows):
    """Those of remote nodes: a tensor's memory may be written."""
    recording = RecordingNode(node, writeable=False)
    found = hps_torch.Embedding(recording, "m", "plain")(torch.arange(6))
    assert not np.shares_memory(recording.vectors, found.numpy())
    found += 1
    assert np.array_equal(found.numpy(), rows["plain"][:6] + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int8], ids=str)
def test_other_dtypes_of_keys_raise_bad_request(node, dtype):
    with pytest.raises(BadRequest, match=r"keys must be int64, int32 or uint64, got torch\.\w+"):
        hps_torch.Embedding(node, "m", "plain")(torch.ones(3).to(dtype))


def test_unknown_names_raise_not_found(node):
    with pytest.raises(NotFound, match="did you mean 'plain'"):
        hps_torch.Embedding(node, "m", "plane")
    with pytest.raises(NotFound, match="'n' is not found"):
        hps_torch.Embedding(node, "n", "plain")
    with pytest.raises(NotFound, match="version 7 is not found"):
        hps_torch.Embedding(node, "m", "plain", version=7)
    with pytest.raises(NotFound, match="no node is registered as 'nowhere'"):
        hps_torch.Embedding("nowhere", "m", "plain")


def test_other_objects_are_no_node():
    with pytest.raises(BadRequest, match=r"dict is not a node; pass the result of hps\.open"):
        hps_torch.Embedding({}, "m", "plain")


@pytest.mark.parametrize("table", ["plain", "half"])
def test_rows_longer_than_max_norm_are_scaled_down(node, rows, table):
    keys, weight = torch.arange(100).reshape(4, 25), torch.from_numpy(rows[table].copy())
    expected = torch.nn.functional.embedding(keys, weight, max_norm=1.0)
    layer = hps_torch.Embedding(node, "m", table, max_norm=1)
    assert layer(keys).dtype == layer.dtype
    torch.testing.assert_close(layer(keys).float(), expected, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(layer(keys).float(), torch.from_numpy(rows[table])[keys])
    assert "max_norm=1.0" in repr(layer)


def test_max_norm_on_a_device_is_that_on_the_host(node, rows):
    keys = torch.arange(100)
    long = torch.from_numpy(rows["plain"] * 3)
    on_host = torch.from_numpy(scale_to_norm(long.numpy(), 2.0))
    torch.testing.assert_close(hps_torch.operators._scale_to_norm(long, 2.0), on_host)
    assert torch.equal(
        hps_torch.Embedding(node, "m", "plain", max_norm=0)(keys), torch.zeros(100, 8)
    )


@pytest.mark.parametrize("max_norm", [-1, float("nan"), "1", True])
def test_other_max_norms_raise_bad_request(node, max_norm):
    with pytest.raises(
        BadRequest, match=r"max_norm is .*; it must be a number, 0 or more, or None"
    ):
        hps_torch.Embedding(node, "m", "plain", max_norm=max_norm)


def test_version_is_pinned(node, rows):
    layer = hps_torch.Embedding(node, "m", "plain", version=1)
    assert torch.equal(layer(torch.arange(3)), torch.from_numpy(rows["plain"][:3]))
    assert repr(layer).startswith("Embedding(m/plain, dim=8, node=node-")
    assert repr(layer).endswith(", version=1)")


def test_table_of_another_dim_raises_bad_request(node):
    layer = hps_torch.Embedding(node, "m", "plain")
    layer._table = (*layer._table[:2], "pooled", *layer._table[3:])
    with pytest.raises(BadRequest, match=r"'m/pooled' has rows of 4 float32 now, .* for 8"):
        layer(torch.arange(3))


def test_closed_node_raises_unavailable(repository, tmp_path):
    settings = {
        "models": {"repository": str(repository)},
        "tiers": {"rocksdb": {"path": str(tmp_path / "db")}},
    }
    with hps.open(settings) as node:
        layer = hps_torch.Embedding(node, "m", "plain")
        bag = hps_torch.EmbeddingBag(node, "m", "pooled")
    for each in (layer, bag):
        with pytest.raises(Unavailable, match="shutting down"):
            each(torch.arange(6).reshape(2, 3))


def test_keys_on_other_devices_raise_bad_request(node):
    table = TableReference.of(node, "m", "plain", None)
    with pytest.raises(BadRequest, match=r"keys are on meta.*pass keys\.cpu\(\)"):
        hps_torch.operators._device_rows(torch.arange(3, device="meta"), table)


# -- nodes by name -----------------------------------------------------------------------------------


def test_a_node_has_one_name(node):
    layers = [hps_torch.Embedding(node, "m", table) for table in ("plain", "pooled")]
    assert layers[0]._table[0] == layers[1]._table[0]


def test_registered_node_is_found_by_name_and_may_be_replaced(node, rows):
    hps_torch.register_node("ranker", RecordingNode(node))
    layer = hps_torch.Embedding("ranker", "m", "plain")
    hps_torch.register_node("ranker", node)
    assert torch.equal(layer(torch.arange(3)), torch.from_numpy(rows["plain"][:3]))
    hps_torch.unregister_node("ranker")
    hps_torch.unregister_node("ranker")
    with pytest.raises(NotFound, match=r"register_node\('ranker', node\)"):
        layer(torch.arange(3))


def test_copies_and_pickles_hold_names_alone(node, rows):
    layer = hps_torch.Embedding(node, "m", "plain")
    assert not [*layer.parameters(), *layer.buffers()]
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(torch.arange(3)), torch.from_numpy(rows["plain"][:3]))


def test_threads_share_a_layer(node, rows):
    layer, expected = hps_torch.Embedding(node, "m", "plain"), reference(rows)
    wrong = []

    def look_up(seed):
        keys = torch.from_numpy(np.random.default_rng(seed).integers(0, 100, (50, 20)))
        wrong.extend(i for i in range(50) if not torch.equal(layer(keys[i]), expected(keys[i])))

    threads = [threading.Thread(target=look_up, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# -- inference only ----------------------------------------------------------------------------------


def test_output_requires_no_gradient_and_the_network_behind_trains(node):
    found = hps_torch.Embedding(node, "m", "plain")(torch.arange(3))
    assert not found.requires_grad
    linear = torch.nn.Linear(8, 1)
    linear(found).sum().backward()
    assert torch.allclose(linear.weight.grad, found.sum(0)[None])


def test_weight_raises_an_error_with_the_remedy(node):
    layer = hps_torch.Embedding(node, "m", "plain")
    with pytest.raises(Unsupported, match=r"has no weight: .* read some by node\.lookup"):
        layer.weight  # noqa: B018
    assert not hasattr(layer, "weight")
    with pytest.raises(AttributeError, match="no attribute 'bias'"):
        layer.bias  # noqa: B018


def test_layer_refuses_to_train(node):
    layer = hps_torch.Embedding(node, "m", "plain")
    assert layer.requires_grad_(False) is layer
    with pytest.raises(Unsupported, match=r"for inference: .* train a torch\.nn layer"):
        layer.requires_grad_()
