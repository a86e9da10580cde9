"""Keys that load tests ask for: those of a server's caches, by feature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from hps.errors import HpsError, NotFound, Unavailable
from hps.tools.bench.hot_key_pools import HotKeyPools, guessed_admin, hot_pools, shares
from hps.tools.bench.load import LoadRecipe, RequestSource, from_metadata, made_requests

HOT_KEYS = [
    {"table": "t", "features": {"a": 0, "b": 5}, "keys": [7, -1, 2**64 - 2], "scores": [255] * 3},
    {"table": "u", "features": {"c": 0}, "keys": [], "scores": []},
]
METADATA = {
    "name": "m",
    "parameters": {"source_outputs": ["a.source", "b.source", "c.source"]},
    "inputs": [{"name": name, "datatype": "INT64", "shape": [-1, 1]} for name in "abc"],
}


def hot_keys(_model: str) -> Sequence[Mapping[str, Any]]:
    return HOT_KEYS


def test_feature_keys_are_table_keys_minus_the_offset() -> None:
    queried: list[str] = []
    pools = hot_pools("m.lookup", lambda model: queried.append(model) or HOT_KEYS)  # type: ignore[func-returns-value]
    assert queried == ["m"]
    assert {name: keys.tolist() for name, keys in pools.keys.items()} == {
        "a": [7, -1, -2],
        "b": [2, -6, -7],
    }


@pytest.mark.parametrize(
    ("error", "why"),
    [(NotFound("Not Found"), "has no hot keys"), (Unavailable("it is away"), "it is away")],
)
def test_missing_hot_keys_have_a_reason(error: HpsError, why: str) -> None:
    def fails(_model: str) -> Sequence[Mapping[str, Any]]:
        raise error

    assert why in hot_pools("m", fails).why
    made, said = made_requests("m", LoadRecipe(2), RequestSource(), lambda _: METADATA, fails)
    assert (len(made), "zipf:1.2 of 0 … 99,999 (no hot keys: " in said, why in said) == (
        2,
        True,
        True,
    )
    assert hot_pools("m", lambda _: []).why == "its caches hold none yet"


def test_requests_use_hot_keys_or_random_ones() -> None:
    made, said = made_requests(
        "m", LoadRecipe(20, batch=3), RequestSource(), lambda _: METADATA, hot_keys
    )
    assert said == "zipf:1.2 of the server's hottest keys"
    drawn = {name: np.unique(np.concatenate([each[name] for each in made])) for name in "abc"}
    assert set(drawn["a"]) == {-2, -1, 7}
    assert set(drawn["b"]) == {-7, -6, 2}
    assert drawn["c"].min() >= 0


@pytest.mark.parametrize("recipe", [LoadRecipe(5, rows=10), LoadRecipe(5, keys="uniform", rows=10)])
def test_rows_option_uses_row_numbers(recipe: LoadRecipe) -> None:
    made, said = made_requests("m", recipe, RequestSource(), lambda _: METADATA, hot_keys)
    assert said == f"{recipe.keys} of 0 … 9"
    assert all(0 <= each["a"].min() <= each["a"].max() < 10 for each in made)
    np.testing.assert_array_equal(made[0]["a"], from_metadata(METADATA, recipe)[0]["a"])


def test_shares_are_named_by_tier() -> None:
    assert shares(np.array([1, 0, 3])) == {"default": 0.25, "cpu": 0.75}
    assert shares(np.array([], np.int64)) == {}
    assert HotKeyPools().keys == {}


@pytest.mark.parametrize(
    ("url", "admin"),
    [
        ("http://a:8000", "http://a:8002"),
        ("grpc://10.0.0.1:8001", "http://10.0.0.1:8002"),
        ("grpcs://[::1]:8001", "https://[::1]:8002"),
    ],
)
def test_guessed_admin_addresses(url: str, admin: str) -> None:
    assert guessed_admin(url) == admin
