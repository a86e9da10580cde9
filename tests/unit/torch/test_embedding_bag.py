"""`hps.torch.EmbeddingBag`: equal to ``torch.nn.EmbeddingBag`` of the same rows."""

from __future__ import annotations

import pytest

from hps.errors import BadRequest, Unsupported
from hps.layers import table_lookup
from tests.support.pytorch import hps_torch, torch

# "plain" is pooled from its rows, "pooled" by the caches: its model has features that pool so.
TABLES = ("plain", "pooled")
MODES = ("sum", "mean")


def both(node, rows, table, mode, **options):
    weight = torch.from_numpy(rows[table])
    expected = torch.nn.EmbeddingBag.from_pretrained(weight, mode=mode, **options)
    return hps_torch.EmbeddingBag(node, "m", table, mode, **options), expected


def assert_equal(found, expected):
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(5, 3), (1, 1), (4, 1), (0, 3), (50, 20)], ids=str)
def test_bags_of_one_length(node, rows, table, mode, shape):
    bag, expected = both(node, rows, table, mode)
    keys = torch.randint(0, 100, shape)
    assert_equal(bag(keys), expected(keys))


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_offsets(node, rows, table, mode, dtype):
    bag, expected = both(node, rows, table, mode)
    keys = torch.randint(0, 100, (11,), dtype=dtype)
    for offsets in ([0], [0, 4, 4, 9], [0, 0, 11], [0, 11]):
        starts = torch.tensor(offsets, dtype=dtype)
        assert_equal(bag(keys, starts), expected(keys, starts))


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("mode", MODES)
def test_last_offset_may_be_included(node, rows, table, mode):
    bag, expected = both(node, rows, table, mode, include_last_offset=True)
    keys, offsets = torch.randint(0, 100, (11,)), torch.tensor([0, 4, 4, 11])
    assert_equal(bag(keys, offsets), expected(keys, offsets))
    assert bag(keys, offsets).shape[0] == 3


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_weights(node, rows, table, dtype):
    bag, expected = both(node, rows, table, "sum")
    keys = torch.randint(0, 100, (6, 3))
    weights = torch.rand(6, 3).to(dtype).float()
    assert_equal(bag(keys, None, weights.to(dtype)), expected(keys, None, weights))
    flat, offsets = keys.reshape(-1), torch.tensor([0, 5, 5])
    found = bag(flat, offsets, per_sample_weights=weights.reshape(-1).to(dtype))
    assert_equal(found, expected(flat, offsets, weights.reshape(-1)))


@pytest.mark.parametrize("table", TABLES)
def test_bags_without_keys_get_zeros_and_absent_keys_the_default(node, table):
    bag = hps_torch.EmbeddingBag(node, "m", table, "mean")
    assert (bag(torch.tensor([], dtype=torch.int64), torch.tensor([0, 0])) == 0).all()
    assert (bag(torch.empty((2, 0), dtype=torch.int64)) == 0).all()
    default = {"plain": 0.5, "pooled": 0.25}[table]
    assert (bag(torch.tensor([[-1, 100]])) == default).all()


def test_float16_tables_give_float16(node, rows):
    bag, keys = hps_torch.EmbeddingBag(node, "m", "half", "sum"), torch.randint(0, 100, (5, 3))
    found = bag(keys)
    assert found.dtype == torch.float16
    expected = torch.from_numpy(rows["half"])[keys].sum(1)
    torch.testing.assert_close(found.float(), expected, rtol=1e-3, atol=1e-3)


def test_batches_above_the_models_limit_are_pooled_from_rows(node, rows):
    bag, expected = both(node, rows, "pooled", "sum")
    keys = torch.randint(0, 100, (70_000, 2))
    assert_equal(bag(keys), expected(keys))


@pytest.mark.parametrize(
    ("mode", "max_norm"), [("sum", None), ("mean", None), ("sqrtn", 0.8)], ids=str
)
def test_caches_and_rows_are_pooled_to_the_same_bits(node, mode, max_norm, monkeypatch):
    bag = hps_torch.EmbeddingBag(node, "m", "pooled", mode, max_norm=max_norm)
    keys, features = torch.randint(0, 110, (40, 30)), []
    lookup = type(node).lookup
    monkeypatch.setattr(
        type(node), "lookup", lambda *a, **o: features.extend(a[2]) or lookup(*a, **o)
    )
    by_feature = bag(keys)
    monkeypatch.setattr(table_lookup, "_pooling_feature", lambda *_: None)
    assert torch.equal(bag(keys), by_feature)
    assert features == [{"sum": "sums", "mean": "means", "sqrtn": "short"}[mode], "pooled"]


def test_features_with_another_max_norm_do_not_pool(node, rows):
    """The model's only feature with sqrtn on this table has a max_norm."""
    bag, keys = hps_torch.EmbeddingBag(node, "m", "pooled", "sqrtn"), torch.tensor([[3, 1, 4]])
    expected = torch.from_numpy(rows["pooled"])[keys].sum(1) / 3**0.5
    assert_equal(bag(keys), expected)


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("max_norm", [None, 0.8])
@pytest.mark.parametrize("mode", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_modes_on_the_host_and_on_a_device_are_tensorflows(
    node, rows, table, max_norm, mode, weighted
):
    bag = hps_torch.EmbeddingBag(node, "m", table, mode, max_norm=max_norm)
    keys, offsets = torch.randint(0, 100, (11,)), torch.tensor([0, 4, 4])
    weights = torch.rand(11) + 0.1 if weighted else None
    vectors = torch.from_numpy(rows[table])[keys]
    if max_norm is not None:
        norms = vectors.norm(dim=1, keepdim=True)
        vectors = torch.where(norms > max_norm, vectors * max_norm / norms, vectors)
    factors = torch.ones(11) if weights is None else weights
    expected = torch.zeros(3, vectors.shape[1])
    for i, span in enumerate([slice(0, 4), slice(0, 0), slice(4, 11)]):
        by = {"sum": 1.0, "mean": factors[span].sum(), "sqrtn": (factors[span] ** 2).sum().sqrt()}
        if i != 1:
            expected[i] = (vectors[span] * factors[span, None]).sum(0) / by[mode]
    assert_equal(bag(keys, offsets, weights), expected)
    on_device = hps_torch.operators._device_bags(vectors, keys, offsets, weights, False, mode)
    assert_equal(on_device, expected)


def test_default_mode_is_that_of_torch(node):
    assert hps_torch.EmbeddingBag(node, "m", "plain").mode == torch.nn.EmbeddingBag(1, 1).mode


FLAT = torch.arange(6)
WRONG = {
    "floats": ((FLAT.float().reshape(2, 3),), "keys must be int64"),
    "no offsets": ((FLAT,), "needs offsets"),
    "offsets 2-D": ((FLAT, FLAT.reshape(2, 3)), "needs offsets"),
    "float offsets": ((FLAT, torch.zeros(2)), "offsets must be int64 or int32"),
    "offsets for 2-D": ((FLAT.reshape(2, 3), FLAT), "takes no offsets"),
    "3-D": ((FLAT.reshape(1, 2, 3),), "must be 1-D or 2-D"),
    "first offset": ((FLAT, torch.tensor([1, 2])), "offsets run from 1 to 6"),
    "falling": ((FLAT, torch.tensor([0, 4, 2])), "offsets fall from 4 to 2"),
    "too large": ((FLAT, torch.tensor([0, 7])), "offsets fall from 7 to 6"),
    "weights' shape": ((FLAT, torch.tensor([0]), torch.rand(5)), "weights have shape"),
    "weights' dtype": ((FLAT, torch.tensor([0]), FLAT), "floating point"),
}


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_arguments_raise_bad_request(node, table, wrong):
    arguments, message = WRONG[wrong]
    with pytest.raises(BadRequest, match=message):
        hps_torch.EmbeddingBag(node, "m", table, "sum")(*arguments)


def test_other_modes_raise_bad_request(node):
    with pytest.raises(BadRequest, match="mode is 'max'; it must be 'sum', 'mean' or 'sqrtn'"):
        hps_torch.EmbeddingBag(node, "m", "plain", "max")


def test_backward_through_weights_raises_an_error_with_the_remedy(node):
    bag = hps_torch.EmbeddingBag(node, "m", "plain", "sum")
    weights = torch.rand(2, 3, requires_grad=True)
    found = bag(FLAT.reshape(2, 3), None, weights)
    with pytest.raises(Unsupported, match=r"for inference: .*no gradient.*torch\.no_grad\(\)"):
        found.sum().backward()
    for inference in (torch.no_grad, torch.inference_mode):
        with inference():
            assert not bag(FLAT.reshape(2, 3), None, weights).requires_grad
