"""Requests that are made up, and those of files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hps.errors import ConfigError
from hps.tools.bench.load import LoadRecipe, different_keys, from_file, from_metadata, samples

METADATA: dict[str, Any] = {
    "name": "m",
    "parameters": {"source_outputs": ["a.source", "b.source"]},
    "inputs": [
        {"name": "a", "datatype": "INT64", "shape": [-1, 3]},
        {"name": "b", "datatype": "INT64", "shape": [-1, -1]},
        {"name": "b.offsets", "datatype": "INT64", "shape": [-1]},
        {"name": "dense", "datatype": "FP32", "shape": [-1, 13]},
    ],
}
OTHER = {
    "name": "o",
    "inputs": [
        {"name": "ids", "datatype": "UINT64", "shape": [-1]},
        {"name": "flag", "datatype": "INT32", "shape": [-1, 1]},
    ],
}


def test_requests_fit_the_metadata() -> None:
    made = from_metadata(METADATA, LoadRecipe(count=5, batch=4, rows=50, hotness=2))
    assert len(made) == 5
    for tensors in made:
        assert {n: (t.shape, t.dtype.name) for n, t in tensors.items()} == {
            "a": ((4, 3), "int64"),
            "b": ((4, 2), "int64"),
            "dense": ((4, 13), "float32"),
        }
        assert all(0 <= tensors[name].min() <= tensors[name].max() < 50 for name in "ab")
        assert samples(tensors) == 4
    assert not np.array_equal(made[0]["a"], made[1]["a"])


def test_equal_seeds_make_equal_requests() -> None:
    first, second = (from_metadata(METADATA, LoadRecipe(count=2, seed=8)) for _ in range(2))
    np.testing.assert_array_equal(first[1]["dense"], second[1]["dense"])


def test_64_bit_tensors_of_other_servers_are_keys() -> None:
    (tensors,) = from_metadata(OTHER, LoadRecipe(count=1, batch=3, hotness=1))
    assert (tensors["ids"].dtype, tensors["ids"].shape) == (np.uint64, (3, 1))
    assert tensors["flag"].max() <= 1


def test_npz_requests_are_sent_unchanged_in_order(tmp_path: Path) -> None:
    arrays = {f"{n}/a": np.full((2, 3), n) for n in (10, 2, 0)} | {"2/b.offsets": np.arange(6)}
    np.savez(tmp_path / "r.npz", **arrays)  # type: ignore[arg-type]
    made = from_file(tmp_path / "r.npz", METADATA, 1)
    assert [int(tensors["a"][0, 0]) for tensors in made] == [0, 2, 10]
    assert [samples(tensors) for tensors in made] == [2, 5, 2]


def test_json_samples_are_joined_to_batches(tmp_path: Path) -> None:
    steps = [
        {"a": {"content": [n, n, n], "shape": [3]}, "dense": {"content": [0.5], "shape": [1]}}
        for n in range(5)
    ]
    (tmp_path / "r.json").write_text(json.dumps({"data": steps}))
    made = from_file(tmp_path / "r.json", METADATA, 2)
    assert [tensors["a"].tolist() for tensors in made] == [
        [[0, 0, 0], [1, 1, 1]],
        [[2, 2, 2], [3, 3, 3]],
    ]
    assert made[0]["dense"].dtype == np.float32


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("r.json", "{}", "'data'"),
        ("r.json", '{"data": []}', "there are 0 samples in it, --batch asks for 2"),
        ("r.npz", "no archive", "r.npz"),
        ("r.txt", "", "expected the .npz or .json"),
    ],
)
def test_invalid_request_file_is_rejected(
    tmp_path: Path, name: str, content: str, says: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=r"--requests .*") as raised:
        from_file(tmp_path / name, METADATA, 2)
    assert says in str(raised.value)


def test_different_keys_are_counted_for_each_tensor() -> None:
    made = from_metadata(METADATA, LoadRecipe(count=50, batch=8, rows=10))
    assert different_keys(made) == 20, (
        "ten each of a and b, none of the offsets and the dense input"
    )
