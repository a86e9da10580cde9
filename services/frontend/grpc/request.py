"""Parser of gRPC inference requests: from the bytes of a ``ModelInferRequest`` to arrays.

Clients write the fields in the order of their numbers: model, version, id, then the description of the
request (parameters, inputs, requested outputs), then the raw tensors. A client's requests repeat the same
description, so the templates parsed from the last ones are kept: a known description is compared, not parsed,
and the arrays refer to the message's memory. protobuf parses whatever is new or unusual.

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
from services.frontend import request_errors as faults
from services.frontend.datatypes import InputRule
from services.frontend.grpc.protobuf_wire import MalformedMessage, content_at, varint
from services.frontend.grpc.typed_contents import contents
from services.frontend.inference_request import InferenceRequest, RawTensor, RequestTemplate
from services.frontend.shared_memory_refs import (
    PARAMETERS,
    SharedMemoryRef,
    SharedMemoryRefs,
    parse_reference,
    require_size,
)

# Tags of fields of ModelInferRequest.
_MODEL, _VERSION, _ID = 0x0A, 0x12, 0x1A
_PARAMETERS, _INPUTS, _OUTPUTS, _RAW = 0x22, 0x2A, 0x32, 0x3A
_DESCRIBES = frozenset({_PARAMETERS, _INPUTS, _OUTPUTS})
# Templates kept per model; longer descriptions are not worth their memory.
_FORMS_KEPT, _FORM_KEPT_BYTES = 256, 8192


@dataclass(slots=True)
class GrpcRequestTemplate(RequestTemplate):
    """The parsed description of a request.

    In a kept one, ``raw`` are the inputs, which take ``raw_size`` bytes after the description; before the
    elements of each are its tag and length, ``raw_heads`` with their offsets. ``heads`` caches the encoded
    heads of its responses.
    """

    raw_size: int = 0
    raw_heads: list[tuple[bytes, int]] = field(default_factory=list)
    heads: dict[Any, tuple[bytes, list[bytes]]] = field(default_factory=dict)


class GrpcInferenceRequest(InferenceRequest):
    """An inference request received over gRPC."""

    __slots__ = ()
    form: GrpcRequestTemplate


class ModelReference(NamedTuple):
    """The requested model and version, the request's ID, and the start of the description."""

    model: str
    version: str
    id: str
    end: int


def address(message: bytes) -> ModelReference:
    """Parse the part of a ``ModelInferRequest`` before its description. Raises ``BadRequest``."""
    size = len(message)
    try:
        # Fast path: most requests have only the model's name.
        if size > 2 and message[0] == _MODEL and 0 < message[1] < 0x80:
            end = message[1] + 2
            if end < size and message[end] > _ID:
                return ModelReference(message[2:end].decode(), "", "", end)
        fields = {_MODEL: "", _VERSION: "", _ID: ""}
        at = 0
        while at < size and (tag := message[at]) in fields:
            start, at = content_at(message, at + 1)
            fields[tag] = message[start:at].decode()
    except (MalformedMessage, UnicodeDecodeError) as error:
        raise _malformed(error) from None
    if fields[_MODEL]:
        return ModelReference(fields[_MODEL], fields[_VERSION], fields[_ID], at)
    request = _parsed(message)  # the fields are in another order
    return ModelReference(request.model_name, request.model_version, request.id, at)


class GrpcRequestParser:
    """Parses the requests to one model. Thread-safe."""

    def __init__(self, model: str, rules: Mapping[str, InputRule], max_keys: int) -> None:
        self._model = model
        self._rules = rules
        self._max_keys = max_keys
        # Threads may race here: a template that is lost is parsed again.
        self._forms: dict[bytes, GrpcRequestTemplate] = {}
        # Sizes of descriptions, by the bytes from their start to the message's end.
        self._sizes: dict[int, int] = {}

    def parse(self, message: bytes, to: ModelReference) -> GrpcInferenceRequest:
        """Parse ``message``. Arrays may share its memory and be read-only.

        Raises ``BadRequest`` or ``TooLarge``.
        """
        size = self._sizes.get(len(message) - to.end)
        if size is not None:
            end = to.end + size
            form = self._forms.get(message[to.end : end])
            if form is not None and _has_tensors(message, end, form):
                return GrpcInferenceRequest(form, None, to.id, message=message, start=end)
        return self._read(message, to)

    def is_prepared(self, message: bytes, to: ModelReference) -> bool:
        """True if requests alike have a prepared prediction, which only copies the message."""
        size = self._sizes.get(len(message) - to.end)
        if size is None:
            return False
        form = self._forms.get(message[to.end : to.end + size])
        return form is not None and form.prepared_message is not None

    def _read(self, message: bytes, to: ModelReference) -> GrpcInferenceRequest:
        request = _parsed(message)
        form = self._form(request)
        sent = request.inputs
        if form.memory_refs is not None:
            sent = [tensor for tensor in sent if tensor.name not in form.memory_refs.inputs]
        if not request.raw_input_contents and (sent or form.memory_refs is None):
            return GrpcInferenceRequest(form, contents(sent, self._rules), request.id)
        inputs = self._raw(sent, request.raw_input_contents, form)
        self._keep(form, message, to.end)
        return GrpcInferenceRequest(form, inputs, request.id)

    def _keep(self, form: GrpcRequestTemplate, message: bytes, start: int) -> None:
        """Keep ``form`` if its description begins at ``start`` and ends where the raw tensors begin."""
        end = _description_end(message, start)
        if end - start > _FORM_KEPT_BYTES or not _has_tensors(message, end, form):
            return
        if len(self._forms) >= _FORMS_KEPT:
            self._forms, self._sizes = {}, {}
        form.kept = True
        self._forms[message[start:end]] = form
        self._sizes[len(message) - start] = end - start

    def _form(self, request: Any) -> GrpcRequestTemplate:
        """Parse everything in a request but the elements of its tensors."""
        form, refs = GrpcRequestTemplate(), SharedMemoryRefs()
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
            if len(tensor.shape) > faults.MOST_DIMENSIONS or min(tensor.shape, default=0) < 0:
                raise faults.wrong_shape(name, list(tensor.shape[:80]), self._model)
            form.shapes[name] = shape = list(tensor.shape)
            keys += prod(shape) if rule.is_keys else 0
            if (place := _place(tensor)) is not None:
                dtype = rule.dtypes[tensor.datatype]
                require_size(name, place, prod(shape) * dtype.itemsize, self._model)
                if tensor.HasField("contents"):
                    raise BadRequest(
                        f"input '{name}' has both contents and shared memory; send one of them"
                    )
                refs.inputs[name] = place, dtype
        if keys > self._max_keys:
            raise faults.too_many_keys(keys, self._max_keys)
        _parameters(form, request.parameters)
        if request.outputs:
            form.outputs = _outputs(request.outputs, refs)
        if refs.inputs or refs.outputs:
            form.memory_refs = refs
        return form

    def _raw(self, tensors: Any, raws: Any, form: GrpcRequestTemplate) -> dict[str, NDArray[Any]]:
        """Return the raw tensors as arrays; record their positions in ``form``."""
        if len(raws) != len(tensors):
            raise BadRequest(
                f"expected {len(tensors)} raw input contents for model '{self._model}', one for each "
                f"input, got {len(raws)}"
            )
        inputs = {}
        for tensor, raw in zip(tensors, raws, strict=True):
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
            form.raw_heads.append((head, form.raw_size))
            form.raw.append(RawTensor(name, dtype, count, form.raw_size + len(head)))
            form.raw_size += len(head) + len(raw)
            inputs[name] = np.frombuffer(raw, dtype) if count else np.empty(0, dtype)
        return inputs


def _has_tensors(message: bytes, end: int, form: GrpcRequestTemplate) -> bool:
    """True if the raw tensors of ``form`` are all that follows a description that ends at ``end``."""
    if len(message) - end != form.raw_size:
        return False
    return all(message.startswith(head, end + offset) for head, offset in form.raw_heads)


def _description_end(message: bytes, at: int) -> int:
    while at < len(message) and message[at] in _DESCRIBES:
        _, at = content_at(message, at + 1)
    return at


def _parameters(form: GrpcRequestTemplate, parameters: Any) -> None:
    """Read the request parameters; unknown ones matter for traffic rules only."""
    if parameters:
        form.parameters = {name: _value(each) for name, each in parameters.items()}
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


def _outputs(wanted: Any, refs: SharedMemoryRefs) -> tuple[str, ...]:
    names = []
    for output in wanted:
        if "classification" in output.parameters:
            raise faults.classification(output.name)
        if output.name in names:
            raise faults.output_twice(output.name)
        if (place := _place(output)) is not None:
            refs.outputs[output.name] = place
        names.append(output.name)
    return tuple(names)


def _place(tensor: Any) -> SharedMemoryRef | None:
    """Return a tensor's reference to shared memory; None if the message has its elements."""
    parameters = tensor.parameters
    ref = {name: _value(parameters[name]) for name in PARAMETERS if name in parameters}
    return parse_reference(tensor.name, ref) if ref else None


def _parsed(message: bytes) -> Any:
    try:
        return pb.ModelInferRequest.FromString(message)
    except Exception as error:  # the class depends on protobuf's build
        raise _malformed(error) from None


def _malformed(error: Exception) -> BadRequest:
    return BadRequest(f"the message is not a valid ModelInferRequest: {error}")
