"""Outputs of lookups of features that are not pooled: which there are, and what they hold."""

from dataclasses import replace

import numpy as np
import orjson
import pytest

from hps.errors import BadRequest
from hps.lookup.base import Feature, LookupModel
from hps.lookup.engine import LookupEngine
from hps.tiers.chain import TierChain
from hps.types import EmbeddingTable, JaggedKeys
from services.frontend.endpoints import named_outputs, output_aliases
from services.frontend.http.request import HttpRequestParser
from services.frontend.lookup_endpoint import LookupEndpoint
from services.frontend.sequence_outputs import SequenceOutputs

ITEMS, SHOPS = EmbeddingTable.make("items", 2), EmbeddingTable.make("shops", 1)
PADDED = {"pooling": "none", "max_length": 2, "truncation": "keep_last"}
FEATURES = [
    Feature("user", ITEMS),
    Feature("rows", ITEMS, pooling="none"),
    Feature("seen.items", ITEMS, keys_of="seen", **PADDED),
    Feature("seen.shops", SHOPS, keys_of="seen", **PADDED),
    Feature("few", ITEMS, pooling="none", max_length=2),
]
MODEL = LookupModel(
    "m", 1, {"items": ITEMS, "shops": SHOPS}, {f.name: f for f in FEATURES}, max_keys=20
)
OUTPUTS = SequenceOutputs(MODEL)
SEEN = JaggedKeys.from_lists([[1, 2, 3], [], [4]])
KEYS = {"seen.items": SEEN, "seen.shops": SEEN}
VECTORS = {
    "seen.items": np.array([[k, -k] for k in (1, 2, 3, 4)], np.float32),
    "seen.shops": np.array([[5], [6], [7], [8]], np.float32),
}


def test_names_are_those_of_features_that_are_not_pooled():
    assert OUTPUTS.names == (
        "rows.offsets",
        *("seen.offsets", "seen.items.padded", "seen.shops.padded", "seen.mask"),
        *("few.offsets", "few.padded", "few.mask"),
    )
    assert OUTPUTS.among(["user", "seen.mask", "rows", "rows.mask"]) == ["seen.mask"]


def test_one_name_stands_for_the_padded_vectors_of_all_tables():
    aliases = output_aliases(MODEL.features)
    found = named_outputs(["seen.padded", "seen.mask", "seen"], aliases)
    assert found == [
        *("seen.items.padded", "seen.shops.padded", "seen.mask", "seen.items", "seen.shops")
    ]
    plain = {f.name: f for f in FEATURES[:2]} | {
        name: Feature(name, ITEMS, keys_of="ad") for name in ("ad.a", "ad.b")
    }
    assert output_aliases(plain).keys() == {"ad", "ad.source"}


def test_outputs_are_made_of_vectors_and_keys():
    names = ["seen.mask", "seen.shops.padded", "seen.items.padded", "seen.offsets"]
    found = OUTPUTS.make(names, KEYS, VECTORS)
    assert list(found) == names
    assert found["seen.mask"].tolist() == [[True, True], [False, False], [True, False]]
    assert found["seen.items.padded"].tolist() == [
        *([[2, -2], [3, -3]], [[0, 0], [0, 0]], [[4, -4], [0, 0]])
    ]
    assert found["seen.shops.padded"].tolist() == [[[6], [7]], [[0], [0]], [[8], [0]]]
    assert found["seen.offsets"].tolist() == [0, 3, 3, 4]  # of the vectors, which are not cut
    assert found["seen.offsets"].dtype == np.int64


def test_output_without_its_keys_is_left_out():
    assert OUTPUTS.make(["rows.offsets", "few.mask", "few.padded"], KEYS, VECTORS) == {}


def test_offsets_of_the_same_number_of_keys():
    keys = {"rows": JaggedKeys.dense([[1, 2, 3], [4, 5, 6]])}
    assert OUTPUTS.make(["rows.offsets"], keys, {})["rows.offsets"].tolist() == [0, 3, 6]


def test_keys_that_cannot_be_padded_are_rejected():
    few = {"few": JaggedKeys.from_lists([[1, 2, 3]])}
    with pytest.raises(BadRequest, match="'few' takes at most 2 keys"):
        OUTPUTS.check(["few.mask"], few)
    OUTPUTS.check(["few.offsets"], few)  # needs no padding
    many = {"few": JaggedKeys(np.empty(0, np.int64), 11, np.zeros(12, np.int64))}
    with pytest.raises(BadRequest, match="at most 20 keys, and has 22 when padded"):
        OUTPUTS.check(["few.padded"], many)


def test_keys_that_cannot_be_padded_are_rejected_before_they_are_looked_up(small):
    served = small.node.models["words"]
    feature = Feature("few", served.tables["left"], pooling="none", max_length=2)
    model = LookupModel("words", 1, served.tables, {"few": feature})
    engine = LookupEngine(
        model, TierChain([small.memory]), TierChain([small.store]), small.node.workers
    )
    endpoint = LookupEndpoint(replace(served, engine=engine), "words.lookup")
    keys = {"name": "few", "datatype": "INT64", "shape": [1, 3], "data": [1, 2, 3]}
    parse = HttpRequestParser("words.lookup", endpoint.rules, 1 << 20).parse
    call = parse(orjson.dumps({"inputs": [keys], "outputs": [{"name": "few.padded"}]}), None)
    with pytest.raises(BadRequest, match="'few' takes at most 2 keys"):
        endpoint.submit(call, 1e12)
    call = parse(orjson.dumps({"inputs": [keys]}), None)
    assert endpoint.submit(call, 1e12).result().vectors["few"].shape == (3, 3)
