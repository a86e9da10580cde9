"""Response bodies, read back by tritonclient."""

from __future__ import annotations

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tritonclient.http import InferResult

from hps.dense.base import DATATYPES as DTYPES
from hps.errors import BadRequest
from services.frontend.http.request import JsonInferenceRequest, JsonRequestTemplate
from services.frontend.http.response import HttpResponseEncoder

shapes = hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=5)
arrays = st.sampled_from(sorted(DTYPES)).flatmap(lambda n: hnp.arrays(DTYPES[n], shapes))


def encode(request_id, outputs, defaulted=0, degraded=(), heads=None, stale_s=0):
    """The body and the length of its JSON header; encoded twice, because heads are cached."""
    form = JsonRequestTemplate(id=request_id, binary={name: binary for name, binary, _ in outputs})
    if heads is not None:
        form.heads = heads
    call = JsonInferenceRequest(form, {})
    named = [(name, array) for name, _, array in outputs]
    encoder = HttpResponseEncoder("m", "3")
    body, headers = None, None
    for _ in range(2):
        reply = encoder.encode(call, defaulted, degraded, stale_s, named)
        assert body in (None, reply.body)
        assert headers in (None, reply.headers)
        body, headers = reply.body, reply.headers
        assert reply.lines == b"".join(b"%b: %b\r\n" % header for header in headers)
    lines = dict(headers)
    assert headers[-1] == (b"content-length", str(len(body)).encode())
    size = int(lines.get(b"inference-header-content-length", 0))
    kind = b"application/octet-stream" if size else b"application/json"
    assert lines[b"content-type"] == kind
    return body, size


def read(body, size):
    return InferResult.from_response_body(body, header_length=size or None)


@given(
    st.lists(st.tuples(st.booleans(), arrays), max_size=5),
    st.text(st.characters(codec="utf-8"), max_size=8),
)
def test_tritonclient_reads_the_encoded_tensors(outputs, request_id):
    sent = [
        (f"o{i}", binary or array.dtype == np.float16, array)
        for i, (binary, array) in enumerate(outputs)
    ]
    body, size = encode(request_id, sent, 7, ("redis", "rocksdb"))
    result = read(body, size)
    head = result.get_response()
    assert (head["model_name"], head["model_version"]) == ("m", "3")
    assert head.get("id", "") == request_id
    assert head["parameters"]["hps_defaulted"] == 7
    assert head["parameters"]["hps_degraded"] == "redis,rocksdb"
    for name, binary, array in sent:
        if binary or array.dtype.kind != "f" or np.isfinite(array).all():
            found = result.as_numpy(name)
            assert found.dtype == array.dtype
            assert found.shape == array.shape
            assert found.tobytes() == array.tobytes()


def test_header_length_is_sent_only_with_binary_data():
    body, size = encode("", [("a", True, np.empty((0, 3), np.float32))])
    assert size == 0
    assert orjson.loads(body)["outputs"][0]["parameters"] == {"binary_data_size": 0}
    assert read(body, size).as_numpy("a").shape == (0, 3)
    body, size = encode("", [("a", True, np.ones(1, np.float32))])
    assert len(body) == size + 4


def test_non_finite_numbers_are_null_in_json_and_counted():
    values = np.array([1, np.nan, np.inf, -np.inf], np.float32)
    body, _ = encode("", [("a", False, values), ("b", False, values[:2])])
    head = orjson.loads(body)
    assert head["parameters"]["hps_not_finite"] == 4
    assert head["outputs"][0]["data"] == [1.0, None, None, None]
    body, size = encode("", [("a", True, values)])
    assert "hps_not_finite" not in orjson.loads(body[:size])["parameters"]
    assert body[size:] == values.tobytes()


def test_half_precision_in_json_is_rejected():
    with pytest.raises(BadRequest, match="output 'a' is FP16, which can only be sent in binary"):
        encode("", [("a", False, np.ones(1, np.float16))])


@pytest.mark.parametrize("binary", [True, False])
def test_non_contiguous_arrays_are_encoded(binary):
    array = np.arange(12, dtype=np.int64).reshape(3, 4)[:, ::2]
    body, size = encode("", [("a", binary, array)])
    assert read(body, size).as_numpy("a").tolist() == array.tolist()


def test_cached_heads_differ_by_all_their_fields():
    heads = {}
    ones, twos = np.ones((1, 2), np.float32), np.ones((2, 1), np.float32)
    for array, defaulted, degraded in (
        (ones, 0, ()),
        (twos, 0, ()),
        (ones, 1, ()),
        (ones, 0, ("cpu",)),
        (ones, 0, ()),
    ):
        body, size = encode("", [("a", True, array)], defaulted, degraded, heads)
        head = read(body, size).get_response()
        assert head["outputs"][0]["shape"] == list(array.shape)
        assert head["parameters"]["hps_defaulted"] == defaulted
        assert head["parameters"]["hps_degraded"] == ",".join(degraded)
    assert len(heads) == 4


def test_number_of_cached_heads_is_bounded():
    heads = {}
    for n in range(500):
        encode("", [("a", True, np.zeros(n, np.uint8))], heads=heads)
    assert len(heads) <= 64


def test_only_stale_answers_are_marked_stale():
    sent = [("o", True, np.ones(3, np.float32))]
    heads = {}  # cached heads are not mixed up
    for stale_s in (0, 12, 0, 13):
        parameters = read(*encode("", sent, heads=heads, stale_s=stale_s)).get_response()[
            "parameters"
        ]
        assert parameters.get("hps_stale_s", 0) == stale_s
        assert ("hps_stale_s" in parameters) == bool(stale_s)
