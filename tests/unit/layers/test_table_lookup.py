"""What the layers of all frameworks share: nodes by name, and lookups in a table of one."""

from __future__ import annotations

import numpy as np
import pytest

import hps
from hps.config.model_schema import ModelSpec
from hps.errors import BadRequest, NotFound
from hps.layers import nodes, table_lookup
from hps.layers.table_lookup import TableReference, look_up_bags, look_up_rows
from hps.lookup.max_norm import scale_to_norm
from hps.lookup.pooling import pool
from hps.models.version_writer import write_version
from hps.types import JaggedKeys
from tests.support.waiting import PATIENT_GUARD

SPEC = {
    "name": "m",
    "tables": [{"name": "plain", "dim": 8, "default": 0.5}, {"name": "pooled", "dim": 4}],
    "features": [
        {"name": "shifted", "table": "plain", "pooling": "sum", "key_offset": 5},
        {"name": "three", "table": "plain", "pooling": "sum", "hotness": 3},
        {"name": "sums", "table": "pooled", "pooling": "sum"},
        {"name": "short", "table": "pooled", "pooling": "sqrtn", "max_norm": 0.8},
    ],
}
ROWS = {
    table["name"]: np.random.default_rng(0).random((100, table["dim"]), np.float32)
    for table in SPEC["tables"]
}


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    root = tmp_path_factory.mktemp("layers")
    tables = {name: (np.arange(100), of) for name, of in ROWS.items()}
    write_version(root / "models", ModelSpec.model_validate(SPEC), 1, tables)
    database = {"path": str(root / "db"), "guard": PATIENT_GUARD}
    settings = {"models": {"repository": str(root / "models")}, "tiers": {"rocksdb": database}}
    with hps.open(settings) as opened:
        yield opened


@pytest.fixture
def asked(node, monkeypatch):
    """The features, or tables, that are looked up."""
    names, lookup = [], type(node).lookup
    monkeypatch.setattr(
        type(node), "lookup", lambda *args, **rest: names.extend(args[2]) or lookup(*args, **rest)
    )
    return names


BAGS = JaggedKeys(np.arange(90, 110), 4, np.array([0, 7, 7, 12, 20]))


@pytest.mark.parametrize(
    ("table", "combiner", "max_norm", "expected"),
    [
        ("pooled", "sum", None, "sums"),
        ("pooled", "sqrtn", 0.8, "short"),
        ("pooled", "sqrtn", None, "pooled"),  # not by the feature that scales rows down
        ("pooled", "sum", 0.8, "pooled"),
        ("pooled", "mean", None, "pooled"),
        ("plain", "sum", None, "plain"),  # not by features with an offset or a hotness
    ],
)
def test_bags_are_pooled_by_a_feature_that_pools_just_so(
    node, asked, table, combiner, max_norm, expected
):
    found = look_up_bags(BAGS, combiner, TableReference.of(node, "m", table, None), max_norm)
    assert asked == [expected]
    default = np.full((10, ROWS[table].shape[1]), 0.5 if table == "plain" else 0, np.float32)
    rows = np.concatenate([ROWS[table][90:], default])
    assert np.array_equal(
        found, pool(rows if max_norm is None else scale_to_norm(rows, max_norm), BAGS, combiner)
    )


def test_batches_above_the_models_limit_are_pooled_from_rows(node, asked):
    bags = JaggedKeys(np.zeros(70_000, np.int64), 70_000)
    look_up_bags(bags, "sum", TableReference.of(node, "m", "pooled", None))
    assert asked == ["pooled"]


@pytest.mark.parametrize("max_norm", [None, 0, 1.2])
def test_rows_are_scaled_down_in_the_result_only(node, max_norm):
    table = TableReference.of(node, "m", "plain", "")
    found = look_up_rows(np.arange(100), table, max_norm)
    expected = ROWS["plain"] if max_norm is None else scale_to_norm(ROWS["plain"], max_norm)
    assert np.array_equal(found, expected)
    found += 1  # its memory may be written
    assert np.array_equal(look_up_rows(np.arange(100), table), ROWS["plain"])


def test_table_of_another_dim_raises_bad_request(node):
    table = TableReference.of(node, "m", "plain", 1)._replace(dim=7)
    for look_up in (
        lambda: look_up_rows(np.arange(3), table),
        lambda: look_up_bags(BAGS, "sum", table),
    ):
        with pytest.raises(BadRequest, match=r"has rows of 8 float32 now, .* for 7 float32"):
            look_up()


def test_wrong_offsets_raise_bad_request(node):
    bags = JaggedKeys(np.arange(6), 2, np.array([0, 7, 6]))
    with pytest.raises(BadRequest, match="offsets fall from 7 to 6"):
        look_up_bags(bags, "sum", TableReference.of(node, "m", "plain", None))


@pytest.mark.parametrize("max_norm", [-1, float("nan"), "1", True])
def test_other_max_norms_raise_bad_request(max_norm):
    with pytest.raises(
        BadRequest, match=r"max_norm is .*; it must be a number, 0 or more, or None"
    ):
        table_lookup.check_max_norm(max_norm)


def test_other_combiners_raise_bad_request():
    with pytest.raises(BadRequest, match="mode is 'max'; it must be 'sum', 'mean' or 'sqrtn'"):
        table_lookup.check_combiner("max", "mode")


# -- nodes by name -----------------------------------------------------------------------------------


def test_a_node_has_one_name(node):
    assert nodes.node_name(node) == nodes.node_name(node)
    assert TableReference.of(node, "m", "plain", None).node == nodes.node_name(node)


def test_registered_node_is_found_by_name_until_it_is_removed(node):
    nodes.register_node("ranker", node)
    assert nodes.find_node("ranker") is node
    nodes.unregister_node("ranker")
    nodes.unregister_node("ranker")
    with pytest.raises(NotFound, match=r"'ranker' in this process.*call register_node\('ranker'"):
        nodes.find_node("ranker")


def test_other_objects_are_no_node():
    with pytest.raises(BadRequest, match=r"dict is not a node; pass the result of hps\.open"):
        nodes.register_node("x", {})
