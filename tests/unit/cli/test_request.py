"""One request from JSON or flags."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hps.cli.request import parse_flags, parse_json
from hps.errors import BadRequest, ConfigError
from hps.tools.signature import DenseInput, ModelSignature

F4 = np.dtype(np.float32)
MODEL = ModelSignature("ctr", ("user", "tags"), {"depth": DenseInput(F4, (-1, 2))})
KEY = st.integers(-(2**63), 2**64 - 1)


def bits(key: int) -> int:
    return int(np.uint64(key & (2**64 - 1)).astype(np.int64))


def test_json_batch_with_a_multi_hot_feature_is_parsed() -> None:
    text = '{"user": [17, 18446744073709551615], "tags": [[1, 2], []], "depth": [[1, 2], [3, 4]]}'
    features, dense = parse_json(text, MODEL)
    assert features["user"].keys.tolist() == [17, -1]
    assert features["user"].offsets is None
    assert features["tags"].offsets.tolist() == [0, 2, 2]
    assert dense["depth"].tolist() == [[1, 2], [3, 4]]


def test_json_sample_without_lists_is_parsed() -> None:
    features, dense = parse_json('{"user": 17, "tags": [[1, 2]], "depth": [1, 2]}', MODEL)
    assert features["user"].batch == 1
    assert features["tags"].hotness == 2
    assert dense["depth"].shape == (1, 2)


@given(st.lists(st.lists(KEY, max_size=3), max_size=5))
def test_every_key_keeps_its_bits_in_all_forms(bags: list[list[int]]) -> None:
    want = [bits(key) for bag in bags for key in bag]
    depth = [[0, 0]] * len(bags)
    plain = {"user": bags, "tags": bags, "depth": depth}
    ends = np.cumsum([0] + [len(bag) for bag in bags]).tolist()
    flat = [key for bag in bags for key in bag]
    tensors = [
        {"name": name, "shape": [len(flat)], "datatype": "UINT64", "data": flat}
        for name in ("user", "tags")
    ] + [
        {"name": f"{name}.offsets", "shape": [len(ends)], "datatype": "INT64", "data": ends}
        for name in ("user", "tags")
    ]
    tensors.append({"name": "depth", "shape": [len(bags), 2], "datatype": "FP32", "data": depth})
    split = {"features": {"user": bags, "tags": bags}, "dense": {"depth": depth}}
    for body in (plain, split, {"inputs": tensors}):
        features, dense = parse_json(json.dumps(body), MODEL)
        for name in ("user", "tags"):
            assert features[name].keys.tolist() == want
            assert features[name].batch == len(bags)
        assert dense["depth"].shape == (len(bags), 2)


def test_protocol_weights_are_kept() -> None:
    tensors = [
        {"name": "user", "shape": [1, 2], "datatype": "INT64", "data": [1, 2]},
        {"name": "user.weights", "shape": [2], "datatype": "FP32", "data": [0.5, 2]},
        {"name": "tags", "shape": [1, 1], "datatype": "INT64", "data": [[3]]},
        {"name": "depth", "shape": [1, 2], "datatype": "FP32", "data": [0.1, 0.2]},
    ]
    features, _ = parse_json(json.dumps({"inputs": tensors}), MODEL)
    assert features["user"].weights.tolist() == [0.5, 2]


def test_flags_are_parsed() -> None:
    features, dense = parse_flags(["user=1,-2", "tags=[[1,2],[3]]", "depth=[[1,2],[3,4]]"], MODEL)
    assert features["user"].keys.tolist() == [1, -2]
    assert features["tags"].offsets.tolist() == [0, 2, 3]
    assert dense["depth"].shape == (2, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[1]", "must be a JSON object"),
        ('{"usr": 1, "tags": 2, "depth": [1, 2]}', "no input 'usr'; did you mean 'user'?"),
        ('{"user": 1, "depth": [1, 2]}', "also needs tags"),
        ('{"user": 1.5, "tags": 2, "depth": [1, 2]}', "feature 'user': 1.5 is not a key"),
        ('{"user": true, "tags": 2, "depth": [1, 2]}', "feature 'user': True is not a key"),
        ('{"user": "x", "tags": 2, "depth": [1, 2]}', "feature 'user': 'x' is not a key"),
        ('{"user": 36893488147419103232, "tags": 2, "depth": [1, 2]}', "is not a key"),
        (
            '{"user": 1, "tags": 2, "depth": [1, 2, 3]}',
            r"shape \[1, 3\], the model wants \[-1, 2\]",
        ),
        ('{"user": 1, "tags": 2, "depth": "x"}', "input 'depth' must be numbers"),
        ('{"inputs": [{"name": "user"}]}', "missing: 'data'"),
        (
            '{"inputs": [{"name": "user", "shape": [3], "datatype": "INT64", "data": [1]}]}',
            "input 'user' has 1 values",
        ),
    ],
)
def test_bad_request_names_the_reason(text: str, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        parse_json(text, MODEL)


@pytest.mark.parametrize("flag", ["user", "user=a", "user=[1"])
def test_invalid_flag_is_quoted(flag: str) -> None:
    with pytest.raises(ConfigError, match="--input"):
        parse_flags([flag], MODEL)


def test_signature_is_read_from_protocol_metadata() -> None:
    metadata = {
        "name": "ctr",
        "inputs": [
            {"name": "user", "datatype": "INT64", "shape": [-1, -1]},
            {"name": "user.offsets", "datatype": "INT64", "shape": [-1]},
            {"name": "depth", "datatype": "FP32", "shape": [-1, 2]},
        ],
    }
    signature = ModelSignature.of_metadata(metadata)
    assert signature.features == ("user",)
    assert signature.dense == {"depth": DenseInput(F4, (-1, 2))}


def test_signature_of_hps_distinguishes_features_from_dense_integers() -> None:
    metadata = {
        "name": "ctr",
        "inputs": [
            {"name": "user", "datatype": "INT64", "shape": [-1, 1]},
            {"name": "hour", "datatype": "INT64", "shape": [-1]},
        ],
        "parameters": {"source_outputs": ["user.source"]},
    }
    signature = ModelSignature.of_metadata(metadata)
    assert signature.features == ("user",)
    assert signature.dense == {"hour": DenseInput(np.dtype(np.int64), (-1,))}
