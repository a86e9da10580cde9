"""Endpoints: every format of requests and answers, and rejected requests."""

from __future__ import annotations

import numpy as np
import pytest

from hps.errors import BadRequest
from services.frontend.http.request import HttpRequestParser

K = "INT64"


def infer(small, model, tensors, outputs=None, **parameters):
    """``infer(name, inputs)``: outputs by name, from the endpoint."""
    import orjson

    entry = small.state.entries[model]
    inputs = [
        {"name": n, "datatype": d, "shape": list(np.shape(v)), "data": np.ravel(v).tolist()}
        for n, d, v in tensors
    ]
    header = {"inputs": inputs, "parameters": parameters}
    if outputs is not None:
        header["outputs"] = [{"name": name} for name in outputs]
    call = HttpRequestParser(model, entry.endpoint.rules, 1 << 20).parse(orjson.dumps(header), None)
    result = entry.endpoint.submit(call, 1e12).result()
    return dict(entry.endpoint.outputs(call, result)), call, result


def rows(keys, dim, default=0.0):
    return [[key + i / 8 for i in range(dim)] if 0 <= key < 20 else [default] * dim for key in keys]


RANKING = [
    ("user", K, [[3]]),
    ("item", K, [[1], [2]]),
    ("history", K, [[1, 2], [3, 5]]),
    ("dense", "FP32", [[1, 2, 3], [4, 5, 6]]),
]


def logits():
    user, item = np.sum(rows([3], 4)), np.sum(rows([1, 2], 2), axis=1)
    history = np.mean([rows([1, 2], 2), rows([3, 5], 2)], axis=1).sum(axis=1)
    return user + item + history + np.array([6, 15])


# -- lookup by feature -----------------------------------------------------------------------------


def test_lookup_with_one_tensor_per_feature(small):
    found, call, result = infer(
        small, "ctr.lookup", [("item", K, [[1], [12]]), ("user", K, [[1], [99]])]
    )
    assert list(found) == ["item", "user"]
    assert found["item"].tolist() == rows([1, 12], 2)
    assert found["user"].tolist() == rows([1, 99], 4)
    assert call.batch == 2
    assert result.defaulted == 1


def test_model_without_network_answers_under_both_names(small):
    for name in ("words", "words.lookup"):
        found, _, _ = infer(small, name, [("left", K, [[1]]), ("right", K, [[2]])])
        assert found["left"].tolist() == rows([1], 3)
        assert found["right"].tolist() == rows([2], 2)


@pytest.mark.parametrize(
    "datatype", ["INT8", "UINT8", "INT16", "UINT16", "INT32", "UINT32", "UINT64"]
)
def test_keys_of_any_integer_type_are_widened_to_64_bits(small, datatype):
    found, _, _ = infer(small, "words.lookup", [("left", datatype, [[7]])])
    assert found["left"].tolist() == rows([7], 3)


def test_unsigned_keys_keep_their_bits(small):
    table = small.node.models["words"].tables["left"]
    small.memory.insert(
        table, np.array([-1]), np.full((1, 3), 9, np.float32), np.ones(1, np.uint64)
    )
    found, _, _ = infer(
        small, "words.lookup", [("left", "UINT64", np.array([2**64 - 1], np.uint64))]
    )
    assert found["left"].tolist() == [[9, 9, 9]]


def test_jagged_keys_with_and_without_weights(small):
    jagged = [("history", K, [1, 3, 5]), ("history.offsets", K, [0, 2, 2, 3])]
    found, call, _ = infer(small, "ctr.lookup", jagged)
    assert call.batch == 3
    assert found["history"].tolist() == [[2, 2.125], [0, 0], [5, 5.125]]
    weights = ("history.weights", "FP32", [3, 1, 2])
    found, _, _ = infer(small, "ctr.lookup", [*jagged, weights])
    assert found["history"].tolist() == [[1.5, 1.625], [0, 0], [5, 5.125]]


def test_weights_with_fixed_hotness(small):
    keys = ("history", K, [[1, 3]])
    for weights in ([[3, 1]], [3, 1]):
        found, _, _ = infer(small, "ctr.lookup", [keys, ("history.weights", "FP32", weights)])
        assert found["history"].tolist() == [[1.5, 1.625]]


def test_one_key_per_sample_needs_no_second_dimension(small):
    found, _, _ = infer(small, "ctr.lookup", [("item", K, [1, 2])])
    assert found["item"].tolist() == rows([1, 2], 2)


def test_source_outputs_have_the_shape_of_the_keys(small):
    keys = [[1, 12], [99, 1]]
    found, _, _ = infer(small, "ctr.lookup", [("history", K, keys)], ["history.source", "history"])
    assert list(found) == ["history.source", "history"]
    assert found["history.source"].tolist() == [[2, 4], [0, 2]]
    assert found["history.source"].dtype == np.uint8


def test_output_without_its_input_is_left_out(small):
    found, _, _ = infer(
        small, "ctr.lookup", [("item", K, [[1]])], ["user", "item", "user.source", "OUTPUT0"]
    )
    assert list(found) == ["item"]


@pytest.mark.parametrize("shape", [(0, 1), (0,), (0, 5)])
def test_an_empty_batch_has_an_empty_answer(small, shape):
    found, call, _ = infer(small, "ctr.lookup", [("history", K, np.zeros(shape, np.int64))])
    assert found["history"].shape == (0, 2)
    assert call.batch == 0


def test_no_keys_at_all_pool_to_zeros(small):
    found, _, _ = infer(small, "ctr.lookup", [("history", K, np.zeros((2, 0), np.int64))])
    assert found["history"].tolist() == [[0, 0], [0, 0]]


LOOKUP_FAULTS = {
    "nothing": ([], "names no feature of model 'ctr.lookup'; send 'user', 'item', 'history'"),
    "three dimensions": ([("item", K, [[[1]]])], r"shape for input 'item': expected \[-1,1\]"),
    "no dimension": ([("item", K, 1)], "shape for input 'item'"),
    "wrong hotness": ([("item", K, [[1, 2]])], "takes 1 key per sample, got 2 keys"),
    "offsets alone": (
        [("history.offsets", K, [0])],
        "'history.offsets' is given without 'history'",
    ),
    "weights alone": (
        [("user", K, [[1]]), ("item.weights", "FP32", [1])],
        "'item.weights' is given without 'item'",
    ),
    "offsets and two dimensions": (
        [("history", K, [[1, 2]]), ("history.offsets", K, [0, 2])],
        r"jagged keys need 'history' of shape \[n\]",
    ),
    "no offsets": ([("history", K, [1]), ("history.offsets", K, [])], "jagged keys need"),
    "offsets fall": (
        [("history", K, [1, 2]), ("history.offsets", K, [0, 3, 2])],
        "offsets fall from 3 to 2",
    ),
    "offsets too long": (
        [("history", K, [1, 2]), ("history.offsets", K, [0, 3])],
        "must run from 0 to the number of keys, 2",
    ),
    "weights too short": (
        [("history", K, [[1, 2]]), ("history.weights", "FP32", [1])],
        "shape for input 'history.weights'",
    ),
    "batches differ": (
        [("item", K, [[1], [2]]), ("history", K, [[1]])],
        "batch sizes differ",
    ),
    "batch too large": (
        [("item", K, [[1]] * 65)],
        "inference request batch-size must be <= 64 for 'ctr', got 65",
    ),
    "KEYS alone": ([("KEYS", K, [1])], "'KEYS' and 'NUMKEYS' go together"),
    "both forms": (
        [("KEYS", K, [1]), ("NUMKEYS", K, [1, 0]), ("item", K, [[1]])],
        "go together and with nothing else, got 'KEYS', 'NUMKEYS', 'item'",
    ),
    "counts of another model": (
        [("KEYS", K, [1]), ("NUMKEYS", K, [1])],
        "has 1 counts, model 'ctr.lookup' has 2 tables: users, items",
    ),
    "no counts": ([("KEYS", K, [1]), ("NUMKEYS", K, [])], "has 0 counts"),
    "negative counts": ([("KEYS", K, [1]), ("NUMKEYS", K, [2, -1])], "must not be negative"),
    "counts beyond the keys": ([("KEYS", K, [1]), ("NUMKEYS", K, [1, 1])], "add up to the 1"),
    "several rows of keys": (
        [("KEYS", K, [[1], [2]]), ("NUMKEYS", K, [1, 1])],
        r"shape for input 'KEYS': expected \[1,-1\]",
    ),
}


@pytest.mark.parametrize("case", LOOKUP_FAULTS)
def test_invalid_lookups_are_rejected(small, case):
    tensors, message = LOOKUP_FAULTS[case]
    with pytest.raises(BadRequest, match=message):
        infer(small, "ctr.lookup", tensors)


def test_unknown_outputs_are_rejected(small):
    with pytest.raises(
        BadRequest, match=r"unexpected inference output \"items\" for model.*'item'"
    ):
        infer(small, "ctr.lookup", [("item", K, [[1]])], ["items"])
    with pytest.raises(BadRequest, match="'top_k' is for ranking models"):
        infer(small, "ctr.lookup", [("item", K, [[1]])], top_k=1)


# -- HPS's KEYS and NUMKEYS ------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, -1), (-1,)])
@pytest.mark.parametrize("model", ["words", "words.lookup"])
def test_lookup_with_keys_and_numkeys(small, model, shape):
    keys = np.array([1, 12, 99, 4, 5]).reshape(shape)
    found, call, result = infer(
        small, model, [("KEYS", K, keys), ("NUMKEYS", "INT32", np.array([3, 2]).reshape(shape))]
    )
    assert list(found) == ["OUTPUT0"]
    flat = np.concatenate([np.ravel(rows([1, 12, 99], 3)), np.ravel(rows([4, 5], 2))])
    assert found["OUTPUT0"].tolist() == flat.tolist()
    assert found["OUTPUT0"].dtype == np.float32
    assert result.defaulted == 1
    assert call.batch == 1


def test_tables_without_keys_are_left_out(small):
    def flat(counts, keys):
        tensors = [("KEYS", K, keys), ("NUMKEYS", "INT32", counts)]
        return infer(small, "words", tensors)[0]["OUTPUT0"].tolist()

    assert flat([0, 1], [4]) == rows([4], 2)[0]
    assert flat([1, 0], [4]) == rows([4], 3)[0]
    assert flat([0, 0], []) == []


def test_source_of_every_key_is_reported(small):
    tensors = [("KEYS", K, [[1, 12, 99]]), ("NUMKEYS", "INT32", [[2, 1]])]
    found, _, _ = infer(small, "words", tensors, ["KEYS.source", "OUTPUT0", "left"])
    assert found["KEYS.source"].tolist() == [[2, 4, 0]]
    assert list(found) == ["KEYS.source", "OUTPUT0"]


def test_half_precision_rows_are_returned_as_float32(small):
    tensors = [("KEYS", K, [1]), ("NUMKEYS", "INT32", [1])]
    found, _, _ = infer(small, "halves", tensors)
    assert found["OUTPUT0"].dtype == np.float32
    assert found["OUTPUT0"].tolist() == rows([1], 4)[0]
    found, _, _ = infer(small, "halves.lookup", [("half", K, [1])])
    assert found["half"].dtype == np.float16


# -- ranking ---------------------------------------------------------------------------------------


def test_ranking_returns_scores(small):
    found, call, _ = infer(small, "ctr", RANKING)
    assert list(found) == ["score", "logit"]
    np.testing.assert_allclose(found["logit"], logits(), rtol=1e-6)
    np.testing.assert_allclose(found["score"], logits()[:, None] / 2, rtol=1e-6)
    assert call.batch == 2


def test_outputs_have_the_order_of_the_request(small):
    found, _, _ = infer(small, "ctr", RANKING, ["item.source", "logit"])
    assert list(found) == ["item.source", "logit"]
    assert found["item.source"].tolist() == [[2], [2]]


def test_ranking_returns_sources_only(small):
    found, _, _ = infer(small, "ctr", RANKING, ["history.source"])
    assert found["history.source"].tolist() == [[2, 2], [2, 2]]


def test_top_k_returns_the_best_candidates(small):
    found, _, _ = infer(small, "ctr", RANKING, top_k=1)
    assert list(found) == ["score", "logit", "top_k_index"]
    assert found["top_k_index"].tolist() == [1]
    np.testing.assert_allclose(found["logit"], logits()[1:], rtol=1e-6)
    found, _, _ = infer(small, "ctr", RANKING, ["top_k_index"], top_k=5)
    assert found["top_k_index"].tolist() == [1, 0]


def test_empty_batch_of_candidates_has_empty_scores(small):
    empty = [(n, d, np.zeros((0, *np.shape(v)[1:]), np.asarray(v).dtype)) for n, d, v in RANKING]
    found, _, _ = infer(small, "ctr", empty)
    assert found["score"].shape == (0, 1)
    assert found["logit"].shape == (0,)


RANKING_FAULTS = {
    "missing": (RANKING[:2], {}, "expected 4 inputs but got 2 .*: missing 'history', 'dense'"),
    "width": (
        [*RANKING[:3], ("dense", "FP32", [[1, 2], [3, 4]])],
        {},
        r"unexpected shape for input 'dense' for model 'ctr'. Expected \[-1, 3\], got \[2, 2\]",
    ),
    "dimensions": ([*RANKING[:3], ("dense", "FP32", [1, 2, 3])], {}, "Expected .-1, 3., got .3."),
    "batch": ([*RANKING[:3], ("dense", "FP32", [[1, 2, 3]])], {}, "batch sizes differ"),
    "output": (RANKING, {"outputs": ["scores"]}, "inference output \"scores\".*mean 'score'"),
    "index": (RANKING, {"outputs": ["top_k_index"]}, "needs the request parameter 'top_k'"),
}


@pytest.mark.parametrize("case", RANKING_FAULTS)
def test_invalid_ranking_requests_are_rejected(small, case):
    tensors, options, message = RANKING_FAULTS[case]
    with pytest.raises(BadRequest, match=message):
        infer(small, "ctr", tensors, **options)
