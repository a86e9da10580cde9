"""Request bodies as tritonclient builds them, and invalid ones."""

from __future__ import annotations

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput

from hps.dense.base import DATATYPES as DTYPES
from hps.errors import BadRequest
from services.frontend.datatypes import INTEGERS, InputRule
from services.frontend.errors import RequestTooLarge
from services.frontend.http.request import HttpRequestParser

RULES = {name: InputRule({name: dtype}) for name, dtype in DTYPES.items()}
RULES["f"] = InputRule(INTEGERS, is_keys=True)
RULES["g"] = InputRule(INTEGERS, is_keys=True)


def parsed(body, size=None, max_keys=1000):
    """The parsed request; parsed twice, because a repeated header is not parsed again."""
    parser = HttpRequestParser("m", RULES, max_keys)
    first, second = parser.parse(body, size), parser.parse(body, size)
    assert (first.form is second.form) == (size is not None and not first.form.json_inputs)
    assert first.inputs.keys() == second.inputs.keys() == first.form.shapes.keys()
    return second


def raw(body, name, max_keys=10):
    return HttpRequestParser("m", RULES, max_keys).raw(body, name)


def dumps(*inputs, **rest):
    return orjson.dumps({"inputs": list(inputs), **rest})


def tensor(name="f", datatype="INT64", shape=(1, 2), data=(1, 2), **parameters):
    made = {"name": name, "datatype": datatype, "shape": list(shape)}
    if data is not None:
        made["data"] = list(data)
    if parameters:
        made["parameters"] = parameters
    return made


shapes = hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=5)
arrays = st.sampled_from(sorted(DTYPES)).flatmap(
    lambda name: st.tuples(
        st.just(name),
        hnp.arrays(DTYPES[name], shapes, elements={"allow_nan": False})
        if DTYPES[name].kind == "f"
        else hnp.arrays(DTYPES[name], shapes),
    )
)


@given(
    st.lists(arrays, min_size=1, max_size=5, unique_by=lambda pair: pair[0]),
    st.data(),
    st.text(st.characters(codec="utf-8"), max_size=8),
)
def test_tensors_of_tritonclient_are_parsed(tensors, data, request_id):
    inputs = []
    for name, array in tensors:
        finite = array.dtype.kind != "f" or bool(np.isfinite(array).all())
        binary = name == "FP16" or not finite or data.draw(st.booleans())
        sent = InferInput(name, list(array.shape), name)
        inputs.append(sent.set_data_from_numpy(array, binary_data=binary))
    body, size = InferenceServerClient.generate_request_body(inputs, request_id=request_id)
    call = parsed(body, size)
    assert call.id == request_id
    assert call.form.outputs is None
    assert call.form.is_binary("any")
    for name, array in tensors:
        found = call.inputs[name]
        assert found.dtype == array.dtype
        assert found.flags.aligned
        assert call.form.shapes[name] == list(array.shape)
        assert found.tobytes() == array.tobytes()


def test_outputs_and_parameters_are_parsed():
    inputs = [InferInput("f", [1, 2], "UINT64")]
    inputs[0].set_data_from_numpy(np.array([[2**64 - 1, 0]], np.uint64))
    outputs = [InferRequestedOutput("a"), InferRequestedOutput("b", binary_data=False)]
    body, size = InferenceServerClient.generate_request_body(
        inputs, outputs=outputs, timeout=1500, priority=2, parameters={"top_k": 3, "mine": "x"}
    )
    call = parsed(body, size)
    assert call.form.outputs == ("a", "b")
    assert [call.form.is_binary(name) for name in "ab"] == [True, False]
    assert (call.form.timeout_us, call.form.top_k) == (1500, 3)
    assert not call.form.is_binary("any")
    assert call.inputs["f"].tolist() == [2**64 - 1, 0]


def test_output_parameter_overrides_that_of_the_request():
    outputs = [{"name": "a"}, {"name": "b", "parameters": {"binary_data": False}}]
    call = parsed(dumps(tensor(), outputs=outputs, parameters={"binary_data_output": True}))
    assert call.form.outputs == ("a", "b")
    assert [call.form.is_binary(name) for name in "ab"] == [True, False]


@pytest.mark.parametrize(
    "data", [[1, 2, 3, 4], [[1, 2], [3, 4]], [[[1], [2]], [[3], [4]]], [[1, 2, 3, 4]]]
)
def test_json_data_may_be_flat_or_nested(data):
    call = parsed(dumps({**tensor(shape=(2, 2)), "data": data}))
    assert call.inputs["f"].tolist() == [1, 2, 3, 4]


def test_empty_and_missing_ids_are_equal():
    assert parsed(dumps(tensor(), id="")).id == ""
    assert parsed(dumps(tensor())).id == ""


def test_64_bit_keys_survive_json():
    keys = [2**64 - 1, 2**63, 0, 2**53 + 1]
    call = parsed(dumps(tensor(datatype="UINT64", shape=(4,), data=keys)))
    assert call.inputs["f"].tolist() == keys
    keys = [-(2**63), 2**63 - 1, -1, 2**53 + 1]
    call = parsed(dumps(tensor(shape=(4,), data=keys)))
    assert call.inputs["f"].tolist() == keys


def test_empty_tensors_take_no_bytes():
    body = dumps(tensor(shape=(0, 3), data=None, binary_data_size=0))
    assert parsed(body, len(body)).form.shapes["f"] == [0, 3]
    assert parsed(dumps(tensor(shape=(2, 0), data=()))).inputs["f"].shape == (0,)


def test_nan_is_accepted_in_binary_form():
    value = np.array([np.nan, np.inf, -0.0], np.float32)
    head = dumps(tensor("FP32", "FP32", (3,), None, binary_data_size=12))
    found = parsed(head + value.tobytes(), len(head)).inputs["FP32"]
    assert found.tobytes() == value.tobytes()


FAULTS = {
    "no JSON": (b"{", "failed to parse the request JSON buffer"),
    "NaN": (b'{"inputs":[NaN]}', "NaN and Infinity are not JSON: send such tensors in binary"),
    "no object": (b"[]", "must be a JSON object"),
    "empty": (b"", "failed to parse"),
    "no inputs": (b"{}", "has no 'inputs'"),
    "inputs null": (b'{"inputs":null}', "'inputs' must be an array"),
    "input a number": (b'{"inputs":[1]}', r"inputs\[0\] must be an object"),
    "no name": (dumps({"shape": [1]}), "no 'name'"),
    "name a number": (dumps({"name": 1}), "no 'name'"),
    "name a list": (dumps({"name": ["f"]}), "no 'name'"),
    "unknown": (
        dumps(tensor("fx")),
        "unexpected inference input \"fx\" for model 'm'; did you mean",
    ),
    "twice": (dumps(tensor(), tensor()), "input 'f' stands twice"),
    "no datatype": (dumps({"name": "f"}), "data-type is null, but model 'm' expects 'INT64'"),
    "wrong datatype": (
        dumps(tensor(datatype="FP32")),
        "inference input 'f' data-type is \"FP32\", but model 'm' expects 'INT64'",
    ),
    "other wrong datatype": (dumps(tensor("FP32", "FP64")), "expects 'FP32'"),
    "datatype a list": (dumps(tensor(datatype=[1])), "data-type is"),
    "no shape": (dumps({"name": "f", "datatype": "INT64", "data": [1]}), "needs a 'shape'"),
    "negative shape": (dumps(tensor(shape=(-1, 2))), "needs a 'shape' of non-negative integers"),
    # Their product would have as many digits as they have together.
    "many dimensions": (dumps(tensor(shape=[1] * 33)), "at most 32, got"),
    "fractional shape": (dumps(tensor(shape=(1.0, 2))), "needs a 'shape'"),
    "true shape": (dumps(tensor(shape=(True, 2))), "needs a 'shape'"),
    "shape an object": (dumps(tensor() | {"shape": {}}), "needs a 'shape'"),
    "shape a text": (dumps(tensor() | {"shape": ""}), "needs a 'shape'"),
    "no data": (dumps(tensor(data=None)), "has no data"),
    "too few": (dumps(tensor(data=[1])), "unexpected number of elements .* takes 2"),
    "too many": (dumps(tensor(data=[1, 2, 3])), "unexpected number of elements"),
    "enormous": (dumps(tensor(shape=(2**62, 2**62))), "unexpected number of elements"),
    "ragged": (dumps(tensor(data=[[1], 2])), "of only INT64 values"),
    "fraction": (dumps(tensor(data=[1, 2.5])), "of only INT64 values"),
    "whole fraction": (dumps(tensor(data=[1, 2.0])), "of only INT64 values"),
    "truth for number": (dumps(tensor(data=[True, 1])), "of only INT64 values"),
    "number for truth": (dumps(tensor("BOOL", "BOOL", data=[1, 0])), "of only BOOL values"),
    "null": (dumps(tensor("FP32", "FP32", data=[None, 1])), "of only FP32 values"),
    "text": (dumps(tensor(data=["1", "2"])), "of only INT64 values"),
    "data an object": (dumps(tensor() | {"data": {}}), "'data' must be an array"),
    "beyond int64": (dumps(tensor(data=[2**63, 1])), "out of range for INT64"),
    "beyond 64 bits": (
        dumps(tensor(data=[7, 2])).replace(b"7", b"18446744073709551616"),
        "out of range for INT64",
    ),
    "below 64 bits": (
        dumps(tensor(data=[[7, 2]])).replace(b"7", b"-9223372036854775809"),
        "out of range for INT64",
    ),
    "beyond int8": (dumps(tensor(datatype="INT8", data=[128, 1])), "out of range for INT8"),
    "below uint8": (dumps(tensor(datatype="UINT8", data=[-1, 1])), "out of range for UINT8"),
    "beyond float32": (dumps(tensor("FP32", "FP32", data=[1e39, 1])), "out of range for FP32"),
    "FP16": (dumps(tensor("FP16", "FP16", data=[1, 1])), "FP16 can only be sent in binary form"),
    "shared memory without a size": (
        dumps(tensor(data=None, shared_memory_region="x")),
        "'shared_memory_byte_size' and 'shared_memory_offset' whole numbers",
    ),
    "shared memory of another size": (
        dumps(tensor(data=None, shared_memory_region="x", shared_memory_byte_size=15)),
        "Expected 16, got 15",
    ),
    "shared memory and data": (
        dumps(tensor(data=[1, 2], shared_memory_region="x", shared_memory_byte_size=16)),
        "both data and a reference to shared memory",
    ),
    "shared memory and binary data": (
        dumps(tensor(data=None, shared_memory_region="x", binary_data_size=16)),
        "both data and a reference to shared memory",
    ),
    "shared memory for an output": (
        dumps(tensor(), outputs=[{"name": "a", "parameters": {"shared_memory_region": "x"}}]),
        "'a': 'shared_memory_region' must be a string",
    ),
    "tensor parameters": (dumps(tensor() | {"parameters": []}), "must be an object"),
    "id": (dumps(tensor(), id=1), "'id' must be a string"),
    "null id": (dumps(tensor(), id=None), "'id' must be a string"),
    "parameters": (dumps(tensor(), parameters=[]), "'parameters' must be an object"),
    "parameter": (dumps(tensor(), parameters={"x": [1]}), "must be a string, number or boolean"),
    "timeout": (dumps(tensor(), parameters={"timeout": -1}), "whole microseconds"),
    "timeout text": (dumps(tensor(), parameters={"timeout": "1"}), "whole microseconds"),
    "timeout huge": (dumps(tensor(), parameters={"timeout": 2**63}), "whole microseconds"),
    "top_k": (dumps(tensor(), parameters={"top_k": 0}), "'top_k' must be a positive integer"),
    "top_k true": (dumps(tensor(), parameters={"top_k": True}), "'top_k' must be a positive"),
    "binary_data_output": (
        dumps(tensor(), parameters={"binary_data_output": 1}),
        "'binary_data_output' must be true or false",
    ),
    "outputs": (dumps(tensor(), outputs={}), "'outputs' must be an array"),
    "output": (dumps(tensor(), outputs=["a"]), r"outputs\[0\] must be an object"),
    "output name": (dumps(tensor(), outputs=[{"name": 3}, {"name": []}]), "with a 'name'"),
    "output twice": (dumps(tensor(), outputs=[{"name": "a"}] * 2), "'a' is requested twice"),
    "output parameters": (
        dumps(tensor(), outputs=[{"name": "a", "parameters": []}]),
        "must be an object",
    ),
    "binary_data": (
        dumps(tensor(), outputs=[{"name": "a", "parameters": {"binary_data": 0}}]),
        "must be true or false",
    ),
    "classification": (
        dumps(tensor(), outputs=[{"name": "a", "parameters": {"classification": 2}}]),
        "classification extension is not offered",
    ),
}


@pytest.mark.parametrize("case", FAULTS)
def test_errors_name_what_is_wrong(case):
    body, message = FAULTS[case]
    with pytest.raises(BadRequest, match=message):
        parsed(body)


BINARY_FAULTS = {
    "truncated": (16, 15, "expecting 1 additional bytes for model 'm'"),
    "no bytes": (16, 0, "expecting 16 additional bytes"),
    "too long": (16, 17, "unexpected additional input data for model 'm': 1 bytes"),
    "size too small": (8, 8, "binary_data_size is 8, shape .1,2. of INT64 takes 16"),
    "size negative": (-16, 16, "binary_data_size is -16"),
    "size a text": ("16", 16, 'binary_data_size is "16"'),
    "size huge": (2**64 - 1, 16, "binary_data_size is"),
}


@pytest.mark.parametrize("case", BINARY_FAULTS)
def test_errors_of_binary_data_name_what_is_wrong(case):
    stated, sent, message = BINARY_FAULTS[case]
    head = dumps(tensor(data=None, binary_data_size=stated))
    with pytest.raises(BadRequest, match=message):
        parsed(head + bytes(sent), len(head))


def test_tensor_with_json_and_binary_data_is_rejected():
    head = dumps(tensor(binary_data_size=16))
    with pytest.raises(BadRequest, match="both 'data' and 'binary_data_size'"):
        parsed(head + bytes(16), len(head))


def test_binary_data_without_header_length_is_rejected():
    head = dumps(tensor(data=None, binary_data_size=16))
    with pytest.raises(BadRequest, match="Inference-Header-Content-Length"):
        parsed(head)


def test_key_limit_applies_to_the_sum_over_features():
    body = dumps(tensor(), tensor("g"))
    assert parsed(body, max_keys=4)
    with pytest.raises(RequestTooLarge, match="has 4 keys, at most 3"):
        parsed(body, max_keys=3)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["name", "shape", "datatype", "data", "parameters", "binary_data_size"]
            ),
            inner,
        )
    ),
    max_leaves=8,
)


@given(
    st.dictionaries(st.sampled_from(["inputs", "outputs", "id", "parameters"]), JSON),
    st.lists(JSON, max_size=2),
    st.binary(max_size=20),
)
def test_arbitrary_body_is_parsed_or_a_bad_request(header, inputs, raw):
    import json

    if inputs:
        header["inputs"] = [tensor(), *inputs]
    text = json.dumps(header).encode()
    message = ""
    try:
        parsed(text + raw, len(text))
    except BadRequest as error:
        message = str(error)
    assert "malformed inference request" not in message  # every fault has its own


def test_raw_request_has_the_bytes_of_the_only_input():
    call = raw(np.arange(3).tobytes(), "f")
    assert call.inputs["f"].tolist() == [0, 1, 2]
    assert call.inputs["f"].dtype == np.int64
    assert call.form.shapes["f"] == [1, 3]
    assert call.form.is_binary("any")


def test_invalid_raw_requests_are_rejected():
    with pytest.raises(BadRequest, match="exactly one input"):
        raw(b"", None)
    with pytest.raises(BadRequest, match="not a multiple of 8"):
        raw(bytes(9), "f")
    with pytest.raises(RequestTooLarge, match="has 11 keys"):
        raw(bytes(88), "f")
