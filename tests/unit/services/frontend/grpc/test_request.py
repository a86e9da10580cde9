"""Messages as tritonclient builds them, and invalid ones."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tritonclient.grpc import service_pb2 as pb

from hps.dense.base import DATATYPES as DTYPES
from hps.errors import BadRequest
from services.frontend.datatypes import INTEGERS, InputRule
from services.frontend.errors import RequestTooLarge
from services.frontend.grpc import request as module
from services.frontend.grpc.protobuf_wire import field, varint
from services.frontend.grpc.request import GrpcRequestParser, address
from services.frontend.grpc.typed_contents import PLACES

RULES = {name: InputRule({name: dtype}) for name, dtype in DTYPES.items()}
RULES["f"] = InputRule(INTEGERS, is_keys=True)
RULES["g"] = InputRule(INTEGERS, is_keys=True)


def make_request(*tensors, **rest):
    """A request for ``(name, datatype, shape, raw or None)``."""
    request = pb.ModelInferRequest(model_name="m", **rest)
    for name, datatype, shape, raw in tensors:
        request.inputs.add(name=name, datatype=datatype, shape=shape)
        if raw is not None:
            request.raw_input_contents.append(raw)
    return request


KEYS = ("f", "INT64", (1, 2), np.array([1, 2]).tobytes())


def parsed(message, parser=None, max_keys=1000):
    """The call; ``message`` is a request or its bytes."""
    if not isinstance(message, bytes):
        message = message.SerializeToString()
    parser = parser or GrpcRequestParser("m", RULES, max_keys)
    return parser.parse(message, address(message))


shapes = hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=5)
arrays = st.sampled_from(sorted(DTYPES)).flatmap(
    lambda name: st.tuples(st.just(name), hnp.arrays(DTYPES[name], shapes))
)


@given(
    st.lists(arrays, max_size=5, unique_by=lambda pair: pair[0]),
    st.text(st.characters(codec="utf-8"), max_size=200),
    st.booleans(),
)
def test_raw_tensors_are_parsed(tensors, request_id, versioned):
    request = make_request(
        *((name, name, array.shape, array.tobytes()) for name, array in tensors),
        id=request_id,
        model_version="1" if versioned else "",
    )
    parser = GrpcRequestParser("m", RULES, 1000)
    first, second = parsed(request, parser), parsed(request, parser)
    for call in (first, second):
        assert call.id == request_id
        assert call.form.outputs is None
        assert call.inputs.keys() == call.form.shapes.keys() == dict(tensors).keys()
        for name, array in tensors:
            found = call.inputs[name]
            assert found.dtype == array.dtype
            assert found.tobytes() == array.tobytes()
            assert found.flags.aligned
            assert call.form.shapes[name] == list(array.shape)
    assert (first.form is second.form) == bool(tensors)


@given(st.lists(arrays.filter(lambda a: a[0] != "FP16"), min_size=1, unique_by=lambda a: a[0]))
def test_tensors_in_typed_contents_are_parsed(tensors):
    request = pb.ModelInferRequest(model_name="m")
    for name, array in tensors:
        tensor = request.inputs.add(name=name, datatype=name, shape=array.shape)
        getattr(tensor.contents, PLACES[name]).extend(array.reshape(-1).tolist())
    call = parsed(request)
    for name, array in tensors:
        assert call.inputs[name].dtype == array.dtype
        np.testing.assert_array_equal(call.inputs[name], array.reshape(-1))


def test_repeated_description_is_parsed_once(monkeypatch):
    parser = GrpcRequestParser("m", RULES, 1000)
    parsed(make_request(KEYS), parser)
    monkeypatch.setattr(module, "_parsed", None)
    other = ("f", "INT64", (1, 2), np.array([7, -8]).tobytes())
    call = parsed(make_request(other, id="another"), parser)
    assert call.inputs["f"].tolist() == [7, -8]
    assert call.id == "another"
    with pytest.raises(TypeError):  # another description
        parsed(make_request(("f", "INT64", (2, 1), KEYS[3])), parser)


def test_tensors_of_a_repeated_request_are_aligned_by_one_copy():
    """Their heads have three bytes each: a copy of each tensor cost a lookup of 26 tables 5 %."""
    keys = {name: np.arange(64) + i for i, name in enumerate("fg")}
    request = make_request(*((n, "INT64", (64, 1), k.tobytes()) for n, k in keys.items()))
    parser = GrpcRequestParser("m", RULES, 1000)
    _, call = parsed(request, parser), parsed(request, parser)
    assert all(call.inputs[name].tolist() == each.tolist() for name, each in keys.items())
    assert all(each.flags.aligned for each in call.inputs.values())
    assert call.inputs["f"].base is call.inputs["g"].base is not None


def test_number_and_size_of_kept_templates_are_bounded(monkeypatch):
    monkeypatch.setattr(module, "_FORMS_KEPT", 2)
    parser = GrpcRequestParser("m", RULES, 1000)
    for count in range(1, 6):
        call = parsed(make_request(("f", "INT64", (1, count), bytes(8 * count))), parser)
        assert call.form.kept
        assert len(parser._forms) <= 2
    long = make_request(KEYS)
    long.parameters["anything"].string_param = "x" * 10_000
    assert not parsed(long, parser).form.kept


def test_fields_may_have_any_order():
    known = make_request(KEYS, id="a", model_version="3")
    parts = [
        field(0x3A, KEYS[3]),
        field(0x2A, known.inputs[0].SerializeToString()),
        field(0x1A, b"a"),
        field(0x12, b"3"),
        field(0x0A, b"m"),
    ]
    message = b"".join(parts)
    assert address(message)[:3] == ("m", "3", "a")
    parser = GrpcRequestParser("m", RULES, 1000)
    for _ in range(2):
        call = parsed(message, parser)
        assert (call.id, call.inputs["f"].tolist()) == ("a", [1, 2])
    assert parsed(known, parser).inputs["f"].tolist() == [1, 2]


def test_known_description_before_an_unknown_field_is_parsed_in_full():
    parser = GrpcRequestParser("m", RULES, 1000)
    message = make_request(KEYS).SerializeToString()
    parsed(message, parser)
    at = message.rindex(b"\x3a\x10")
    # Of the same size and still protobuf, but an unknown field instead of the raw tensor.
    unknown = message[:at] + b"\x7a" + message[at + 1 :]
    with pytest.raises(BadRequest, match="unexpected number of elements 0 in int64_contents"):
        parsed(unknown, parser)


def test_parameters_and_outputs_are_parsed():
    request = make_request(KEYS)
    request.parameters["timeout"].int64_param = 5
    request.parameters["top_k"].uint64_param = 3
    request.parameters["else"].double_param = 0.5
    request.outputs.add(name="a")
    request.outputs.add(name="b")
    form = parsed(request).form
    assert (form.timeout_us, form.top_k, form.outputs) == (5, 3, ("a", "b"))


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (make_request(("x", "INT64", (1,), b"")), "unexpected inference input \"x\" for model 'm'"),
        (
            make_request(("f", "FP32", (1,), bytes(4))),
            "data-type is \"FP32\", but model 'm' expects",
        ),
        (make_request(("f", "INT64", (-1,), b"")), "needs a 'shape' of non-negative integers"),
        (make_request(("f", "INT64", [1] * 33, bytes(8))), "at most 32, got"),
        (make_request(KEYS, KEYS), "input 'f' stands twice"),
        (
            make_request(("f", "INT64", (3,), bytes(16))),
            r"16 raw bytes, shape \[3\] of INT64 takes 24",
        ),
        (make_request(KEYS, ("g", "INT64", (1,), None)), "expected 2 raw input contents"),
        (
            make_request(("f", "INT64", (1,), None)),
            "unexpected number of elements 0 in int64_contents",
        ),
        (make_request(("FP16", "FP16", (1,), None)), "FP16 can only be sent in raw_input_contents"),
    ],
)
def test_errors_name_what_is_wrong(message, error):
    with pytest.raises(BadRequest, match=error):
        parsed(message)


def test_invalid_typed_contents_are_rejected():
    request = make_request(("f", "INT32", (1,), None))
    request.inputs[0].contents.int64_contents.append(1)
    with pytest.raises(BadRequest, match="belong in int_contents, not in int64_contents"):
        parsed(request)
    request = make_request(("f", "INT8", (1,), None))
    request.inputs[0].contents.int_contents.append(300)
    with pytest.raises(BadRequest, match="out of range for INT8"):
        parsed(request)
    request = make_request(KEYS)
    request.inputs[0].contents.int64_contents.extend([1, 2])
    with pytest.raises(BadRequest, match="contents field must not be specified"):
        parsed(request)


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("int64_param", "timeout", -1),
        ("string_param", "timeout", "5"),
        ("int64_param", "top_k", 0),
        ("bool_param", "top_k", True),
    ],
)
def test_invalid_parameters_are_rejected(kind, name, value):
    request = make_request(KEYS)
    setattr(request.parameters[name], kind, value)
    with pytest.raises(BadRequest, match=f"parameter '{name}' must be"):
        parsed(request)


def test_unsupported_extensions_are_rejected():
    request = make_request(KEYS)
    request.outputs.add(name="a").parameters["classification"].int64_param = 1
    with pytest.raises(BadRequest, match="classification extension is not offered"):
        parsed(request)
    request = make_request(KEYS)
    request.outputs.add(name="a")
    request.outputs.add(name="a")
    with pytest.raises(BadRequest, match="output 'a' is requested twice"):
        parsed(request)


def test_too_many_keys_are_rejected():
    with pytest.raises(RequestTooLarge, match="has 4 keys, at most 3"):
        parsed(make_request(KEYS, ("g", *KEYS[1:])), max_keys=3)


@given(st.binary(max_size=60))
def test_bytes_that_are_no_message_are_rejected(message):
    with suppress(BadRequest):
        parsed(message)


def test_truncated_message_is_rejected():
    message = make_request(KEYS, id="a").SerializeToString()
    for size in range(1, len(message)):
        with suppress(BadRequest):
            assert not parsed(message[:size]).inputs  # cut between two fields


@given(st.integers(0, 2**31))
def test_varint_encodes_as_protobuf_does(number):
    assert pb.ModelInferRequest.FromString(b"\xd8\x3e" + varint(number)) is not None
    encoded = varint(number)
    found = sum((byte & 0x7F) << 7 * i for i, byte in enumerate(encoded))
    assert found == number
    assert all(byte >= 0x80 for byte in encoded[:-1])


def test_repeated_reference_to_shared_memory_is_parsed_once(monkeypatch):
    parser = GrpcRequestParser("m", {"f": InputRule(INTEGERS, is_keys=True)}, 1000)
    request = pb.ModelInferRequest(model_name="m")
    tensor = request.inputs.add(name="f", datatype="INT64", shape=[2, 1])
    tensor.parameters["shared_memory_region"].string_param = "r"
    tensor.parameters["shared_memory_byte_size"].int64_param = 16
    message = request.SerializeToString()
    first = parser.parse(message, address(message))
    monkeypatch.setattr(module, "_parsed", None)
    assert parser.parse(message, address(message)).form is first.form
    assert first.form.memory_refs.inputs["f"][0] == ("r", 16, 0)
    monkeypatch.undo()
    tensor.contents.int64_contents.extend([1, 2])
    message = request.SerializeToString()
    with pytest.raises(BadRequest, match="both contents and shared memory"):
        parser.parse(message, address(message))
