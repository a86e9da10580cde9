"""Inference requests over gRPC: from the bytes of a ``ModelInferRequest`` to arrays.

Clients write the fields in the order of their numbers: model, version, id, then what describes the
request (parameters, inputs, requested outputs), then the raw tensors. The description of a client's
requests is the same again and again, so the forms read from the last ones are kept: a description that
was seen before is compared, not read, and the tensors are taken where they lie. Whatever is new or
unusual is read by protobuf.

Layout: protobuf's encoding specification, and Triton's ``grpc_service.proto`` for the fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2 as pb

from hps.errors import BadRequest
from services.frontend import faults
from services.frontend.call import Call, Form
from services.frontend.datatypes import BINARY_ONLY, InputRule
from services.frontend.grpc.wire import Malformed, content_at, varint

# Fields of ModelInferRequest by their tags.
_MODEL, _VERSION, _ID = 0x0A, 0x12, 0x1A
_PARAMETERS, _INPUTS, _OUTPUTS, _RAW = 0x22, 0x2A, 0x32, 0x3A
_DESCRIBES = frozenset({_PARAMETERS, _INPUTS, _OUTPUTS})
# Forms that are kept per model; longer descriptions are not worth their memory.
_FORMS_KEPT, _FORM_KEPT_BYTES = 256, 8192


class _Raw(NamedTuple):
    """Where one raw tensor lies behind the description: ``head``, its tag and length, ends at ``offset``."""

    name: str
    dtype: np.dtype[Any]
    elements: int
    head: bytes
    offset: int


@dataclass(slots=True)
class GrpcForm(Form):
    """What describes a request. When it is kept, ``raw`` are its inputs, which take ``raw_size`` bytes
    behind it, and ``heads`` is what was written before the tensors of answers to it."""

    raw: list[_Raw] = field(default_factory=list)
    raw_size: int = 0
    heads: dict[Any, bytes] = field(default_factory=dict)


@dataclass(slots=True)
class GrpcCall(Call):
    """A request that came by gRPC."""

    form: GrpcForm


class Address(NamedTuple):
    """Whom a request is for, and where its description begins."""

    model: str
    version: str
    id: str
    end: int


def address(message: bytes) -> Address:
    """What stands before the description of a ``ModelInferRequest``; ``BadRequest`` when it is none."""
    found = {_MODEL: "", _VERSION: "", _ID: ""}
    at, size = 0, len(message)
    try:
        while at < size and (tag := message[at]) in found:
            start, at = content_at(message, at + 1)
            found[tag] = message[start:at].decode()
    except (Malformed, UnicodeDecodeError) as error:
        raise _malformed(error) from None
    if found[_MODEL]:
        return Address(found[_MODEL], found[_VERSION], found[_ID], at)
    request = _parsed(message)  # the fields have another order
    return Address(request.model_name, request.model_version, request.id, at)


class Parser:
    """Reads the requests to one model. May be called from any thread."""

    def __init__(self, model: str, rules: Mapping[str, InputRule], max_keys: int) -> None:
        self._model = model
        self._rules = rules
        self._max_keys = max_keys
        # Threads may race here: a form that is lost is read again.
        self._forms: dict[bytes, GrpcForm] = {}
        self._sizes: dict[int, int] = {}  # of a description, by all bytes from where it begins

    def parse(self, message: bytes, to: Address) -> GrpcCall:
        """The request in ``message``. Arrays may share its memory and be read-only. Raises ``BadRequest`` or
        ``TooLarge``."""
        size = self._sizes.get(len(message) - to.end)
        if size is not None:
            end = to.end + size
            form = self._forms.get(message[to.end : end])
            if form is not None and (inputs := _taken(message, end, form)) is not None:
                return GrpcCall(form, inputs, to.id)
        return self._read(message, to)

    def _read(self, message: bytes, to: Address) -> GrpcCall:
        request = _parsed(message)
        form = self._form(request)
        if not request.raw_input_contents:
            return GrpcCall(form, self._contents(request, form), request.id)
        inputs = self._raw(request, form)
        self._keep(form, message, to.end)
        return GrpcCall(form, inputs, request.id)

    def _keep(self, form: GrpcForm, message: bytes, start: int) -> None:
        """Keep ``form`` when the description begins at ``start`` and ends where the raw tensors begin."""
        end = _description_end(message, start)
        if end - start > _FORM_KEPT_BYTES or _taken(message, end, form) is None:
            return
        if len(self._forms) >= _FORMS_KEPT:
            self._forms, self._sizes = {}, {}
        form.kept = True
        self._forms[message[start:end]] = form
        self._sizes[len(message) - start] = end - start

    def _form(self, request: Any) -> GrpcForm:
        """All of a request but its tensors' elements."""
        form = GrpcForm()
        keys = 0
        for tensor in request.inputs:
            name = tensor.name
            rule = self._rules.get(name)
            if rule is None:
                raise faults.unknown_input(name, self._model, self._rules)
            if name in form.shapes:
                raise faults.twice(name)
            if tensor.datatype not in rule.dtypes:
                raise faults.wrong_type(name, tensor.datatype, self._model, rule)
            if "shared_memory_region" in tensor.parameters:
                raise faults.shared_memory(name)
            form.shapes[name] = shape = list(tensor.shape)
            if min(shape, default=0) < 0:
                raise faults.wrong_shape(name, shape, self._model)
            keys += prod(shape) if rule.is_keys else 0
        if keys > self._max_keys:
            raise faults.too_many_keys(keys, self._max_keys)
        _parameters(form, request.parameters)
        if request.outputs:
            form.outputs = _outputs(request.outputs)
        return form

    def _raw(self, request: Any, form: GrpcForm) -> dict[str, NDArray[Any]]:
        """The elements of raw tensors, and where they lie."""
        raws = request.raw_input_contents
        if len(raws) != len(request.inputs):
            raise BadRequest(
                f"expected {len(request.inputs)} raw input contents for model '{self._model}', one for each "
                f"input, got {len(raws)}"
            )
        inputs = {}
        for tensor, raw in zip(request.inputs, raws, strict=True):
            name = tensor.name
            if tensor.HasField("contents"):
                raise BadRequest(
                    f"contents field must not be specified when using raw_input_contents for '{name}' for "
                    f"model '{self._model}'"
                )
            dtype, count = self._rules[name].dtypes[tensor.datatype], prod(tensor.shape)
            if len(raw) != count * dtype.itemsize:
                raise BadRequest(
                    f"unexpected size for input '{name}' of model '{self._model}': {len(raw)} raw bytes, "
                    f"shape {list(tensor.shape)} of {tensor.datatype} takes {count * dtype.itemsize}"
                )
            head = b"%c%b" % (_RAW, varint(len(raw)))
            form.raw.append(_Raw(name, dtype, count, head, form.raw_size + len(head)))
            form.raw_size += len(head) + len(raw)
            inputs[name] = np.frombuffer(raw, dtype) if count else np.empty(0, dtype)
        return inputs

    def _contents(self, request: Any, form: GrpcForm) -> dict[str, NDArray[Any]]:
        """The elements of tensors that carry them in protobuf's own types."""
        inputs = {}
        for tensor in request.inputs:
            name, datatype = tensor.name, tensor.datatype
            if datatype in BINARY_ONLY:
                raise BadRequest(
                    f"input '{name}': {datatype} can only be sent in raw_input_contents"
                )
            dtype, count = self._rules[name].dtypes[datatype], prod(tensor.shape)
            given = {found.name for found, _ in tensor.contents.ListFields()}
            place = _CONTENTS[datatype]
            if given - {place}:
                raise BadRequest(
                    f"input '{name}' is {datatype}, whose elements belong in {place}, not in "
                    f"{', '.join(sorted(given - {place}))}"
                )
            values = getattr(tensor.contents, place)
            if len(values) != count:
                raise BadRequest(
                    f"unexpected number of elements {len(values)} in {place} of input '{name}': its shape "
                    f"{form.shapes[name]} takes {count}"
                )
            inputs[name] = array = np.array(values, _WIDE[place]).astype(dtype)
            if dtype.kind in "iu" and not np.array_equal(array, values):
                raise BadRequest(f"input '{name}' has a number beyond the range of {datatype}")
        return inputs


# Where elements stand that are not raw; small integers travel in a wider type.
_CONTENTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
}
_WIDE = {
    "bool_contents": np.bool_,
    "int_contents": np.int32,
    "int64_contents": np.int64,
    "uint_contents": np.uint32,
    "uint64_contents": np.uint64,
    "fp32_contents": np.float32,
    "fp64_contents": np.float64,
}


def _taken(message: bytes, end: int, form: GrpcForm) -> dict[str, NDArray[Any]] | None:
    """The raw tensors behind a description that ends at ``end``; None when they lie otherwise than ``form``
    says."""
    if len(message) - end != form.raw_size:
        return None
    inputs = {}
    for name, dtype, elements, head, offset in form.raw:
        start = end + offset
        if not message.startswith(head, start - len(head)):
            return None
        if not elements:
            inputs[name] = np.empty(0, dtype)
            continue
        flat = np.frombuffer(message, dtype, elements, start)
        inputs[name] = flat if flat.flags.aligned else flat.copy()
    return inputs


def _description_end(message: bytes, at: int) -> int:
    while at < len(message) and message[at] in _DESCRIBES:
        _, at = content_at(message, at + 1)
    return at


def _parameters(form: GrpcForm, parameters: Any) -> None:
    """What is said by request parameters; others are nobody's business."""
    for name in ("timeout", "top_k"):
        if name in parameters:
            value = _value(parameters[name])
            if name == "timeout":
                form.timeout_us = faults.checked_timeout(value)
            else:
                form.top_k = faults.checked_top_k(value)


def _value(parameter: Any) -> Any:
    choice = parameter.WhichOneof("parameter_choice")
    return None if choice is None else getattr(parameter, choice)


def _outputs(wanted: Any) -> tuple[str, ...]:
    names = []
    for output in wanted:
        if "classification" in output.parameters:
            raise faults.classification(output.name)
        if "shared_memory_region" in output.parameters:
            raise faults.shared_memory(output.name)
        if output.name in names:
            raise faults.output_twice(output.name)
        names.append(output.name)
    return tuple(names)


def _parsed(message: bytes) -> Any:
    try:
        return pb.ModelInferRequest.FromString(message)
    except Exception as error:  # the class of protobuf's depends on how protobuf was built
        raise _malformed(error) from None


def _malformed(error: Exception) -> BadRequest:
    return BadRequest(f"the message is no ModelInferRequest: {error}")
