"""``KEYS`` and ``NUMKEYS`` by table, and by feature where HPS fused the tables."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from hps.lookup.base import Feature
from hps.types import EmbeddingTable
from services.frontend.hps_keys_format import HpsKeysFormat


def engine(features: dict[str, str], dims: dict[str, int]) -> SimpleNamespace:
    tables = {name: EmbeddingTable.make(name, dim) for name, dim in dims.items()}
    found = {name: Feature(name, tables[table]) for name, table in features.items()}
    return SimpleNamespace(tables=tables, features=found)


def test_keys_are_split_by_table():
    form = HpsKeysFormat(engine({"old": "user", "new": "user"}, {"user": 2, "item": 3}))
    assert form.names == ["user", "item"]
    assert {n: k.keys.tolist() for n, k in form.split(np.arange(3), [2, 1]).items()} == {
        "user": [0, 1],
        "item": [2],
    }
    assert list(form.split(np.arange(3), [0, 3])) == ["item"]


def test_keys_are_split_by_feature_if_hps_fused_the_tables():
    features = {"user": "fused_embedding1", "item": "fused_embedding0", "shop": "fused_embedding1"}
    of = engine(features, {"fused_embedding0": 1, "fused_embedding1": 2})
    form = HpsKeysFormat(of)
    assert form.names == ["user", "item", "shop"]
    assert form.dims(of) == {"user": 2, "item": 1, "shop": 2}
    counts = [2, 3, 1]
    split = form.split(np.arange(6), counts)
    assert {n: k.keys.tolist() for n, k in split.items()} == {
        "fused_embedding1": [0, 1, 5],
        "fused_embedding0": [2, 3, 4],
    }
    joined = form.join({n: 10 * k.keys for n, k in split.items()}, np.array(counts))
    assert [each.tolist() for each in joined] == [[0, 10], [20, 30, 40], [50]]
    split = form.split(np.arange(2), [0, 1, 1])
    joined = form.join({n: k.keys for n, k in split.items()}, np.array([0, 1, 1]))
    assert [each.tolist() for each in joined] == [[0], [1]]


def test_fused_table_of_one_feature_has_the_features_name():
    form = HpsKeysFormat(engine({"user": "fused_embedding0"}, {"fused_embedding0": 2}))
    assert form.names == ["user"]
    split = form.split(np.arange(2), [2])
    assert list(split) == ["fused_embedding0"]
    joined = form.join({"fused_embedding0": np.arange(2)}, np.array([2]))
    assert [each.tolist() for each in joined] == [[0, 1]]
