"""Parser of REST inference requests: from the bytes of a body to arrays.

A body is a JSON header followed by raw tensors. The parsed header is a ``RequestTemplate``; the requests of a
client are alike, so the last templates are kept and a known header is not parsed again.

The fast pass trusts the header, and any exception means that the request has a fault; only then does
``request_faults.explain`` check every field to name it. A faulty request is never answered: each check of the
slow pass has its counterpart in the fast one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from hps.bounded_memo import memoize
from hps.errors import BadRequest
from services.frontend import request_errors as faults
from services.frontend.datatypes import InputRule, numbers
from services.frontend.http.request_faults import explain
from services.frontend.inference_request import InferenceRequest, RawTensor, RequestTemplate
from services.frontend.shared_memory_refs import (
    PARAMETERS,
    SharedMemoryRefs,
    parse_reference,
    require_size,
)

_EMPTY: dict[str, Any] = {}
# Parameters of outputs that name an unsupported extension.
_REFUSED = frozenset({"classification"})
_PLACES = frozenset(PARAMETERS)
# Exceptions that a faulty request may raise in the fast pass.
_FAULTS = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError)
# Templates kept per model; longer headers are not worth their memory.
_FORMS_KEPT, _HEADER_KEPT = 256, 8192


@dataclass(slots=True)
class JsonRequestTemplate(RequestTemplate):
    """A parsed JSON header.

    ``json_inputs`` are the elements of inputs with JSON data; ``raw`` follow in ``raw_size`` bytes.
    ``binary``: by output name, whether it is sent as binary;
    ``others_binary`` holds for other outputs.

    ``heads`` are the heads of answers that ``HttpResponseEncoder`` has written for a kept template.
    """

    id: str = ""
    json_inputs: dict[str, NDArray[Any]] = field(default_factory=dict)
    raw_size: int = 0
    binary: dict[str, bool] = field(default_factory=dict)
    others_binary: bool = False
    heads: dict[Any, Any] = field(default_factory=dict)

    def is_binary(self, output: str) -> bool:
        return self.binary.get(output, self.others_binary)


class JsonInferenceRequest(InferenceRequest):
    """A request with a JSON header."""

    __slots__ = ()
    form: JsonRequestTemplate


class HttpRequestParser:
    """Parses the requests to one model. Runs on one thread."""

    def __init__(self, model: str, rules: Mapping[str, InputRule], max_keys: int) -> None:
        self._model = model
        self._rules = rules
        self._max_keys = max_keys
        self._forms: dict[bytes, JsonRequestTemplate] = {}

    def parse(self, body: bytes, header_size: int | None) -> JsonInferenceRequest:
        """Parse ``body``, whose first ``header_size`` bytes are JSON (None: all of them).

        Raises ``BadRequest`` or ``TooLarge``. Arrays may share memory with ``body`` and be read-only.
        """
        try:
            if header_size is None:
                return _call(self._read(body), body, len(body))
            text = body[:header_size]
            form = self._forms.get(text)
            if form is None:
                form = self._read(text)
                if not form.json_inputs and header_size <= _HEADER_KEPT:
                    form.kept = True
                    memoize(self._forms, text, form, _FORMS_KEPT)
            return _call(form, body, header_size)
        except _FAULTS as error:
            raise explain(body, header_size, self._model, self._rules, error) from None

    def _read(self, text: bytes) -> JsonRequestTemplate:
        form = _form(orjson.loads(text), self._rules, self._model)
        keys = sum(data.size for n, data in form.json_inputs.items() if self._rules[n].is_keys)
        keys += sum(raw.elements for raw in form.raw if self._rules[raw.name].is_keys)
        if form.memory_refs is not None:
            keys += sum(
                place.size // dtype.itemsize
                for n, (place, dtype) in form.memory_refs.inputs.items()
                if self._rules[n].is_keys
            )
        if keys > self._max_keys:
            raise faults.too_many_keys(keys, self._max_keys)
        return form

    def raw(self, body: bytes, name: str | None) -> JsonInferenceRequest:
        """Parse a raw request (``Inference-Header-Content-Length: 0``): the body is input ``name``.

        It is one sample of as many elements as there are; every output is sent as binary. ``name`` is None
        for a model with more than one input, which is rejected.
        """
        if name is None:
            raise BadRequest(
                f"a raw request needs a model with exactly one input, '{self._model}' takes more; send "
                "the JSON header and Inference-Header-Content-Length"
            )
        rule = self._rules[name]
        dtype = next(iter(rule.dtypes.values()))  # the model's own type
        if len(body) % dtype.itemsize:
            raise BadRequest(
                f"unexpected size for input '{name}' of model '{self._model}': {len(body)} bytes are "
                f"not a multiple of {dtype.itemsize}"
            )
        count = len(body) // dtype.itemsize
        if rule.is_keys and count > self._max_keys:
            raise faults.too_many_keys(count, self._max_keys)
        form = JsonRequestTemplate(shapes={name: [1, count]}, others_binary=True)
        return JsonInferenceRequest(form, {name: np.frombuffer(body, dtype)})


def _form(
    header: dict[str, Any], rules: Mapping[str, InputRule], model: str
) -> JsonRequestTemplate:
    form, refs = JsonRequestTemplate(), SharedMemoryRefs()
    offset = 0
    for item in header["inputs"]:
        name = item["name"]
        dtype = rules[name].dtypes[item["datatype"]]
        shape = item["shape"]
        if type(shape) is not list or len(shape) > faults.MOST_DIMENSIONS:
            raise TypeError("shape")
        count = 1
        for dim in shape:
            if type(dim) is not int or dim < 0:
                raise ValueError("shape")
            count *= dim
        if name in form.shapes:
            raise ValueError("duplicate")
        form.shapes[name] = shape
        parameters = item.get("parameters")
        size = None if parameters is None else parameters.get("binary_data_size")
        if size is None:
            if parameters is not None and not _PLACES.isdisjoint(parameters):
                if "data" in item:
                    raise ValueError("data")
                place = parse_reference(name, parameters)
                require_size(name, place, count * dtype.itemsize, model)
                refs.inputs[name] = place, dtype
                continue
            form.json_inputs[name] = numbers(item["data"], dtype, count)
            continue
        if size != count * dtype.itemsize or "data" in item or not _PLACES.isdisjoint(parameters):
            raise ValueError("binary_data_size")
        form.raw.append(RawTensor(name, dtype, count, offset))
        offset += count * dtype.itemsize
    form.raw_size = offset
    _with_options(form, header, refs)
    if refs.inputs or refs.outputs:
        form.memory_refs = refs
    return form


def _call(form: JsonRequestTemplate, body: bytes, start: int) -> JsonInferenceRequest:
    """Create the request from its template and the bytes of ``body`` from ``start`` on."""
    if len(body) - start != form.raw_size:
        raise ValueError("size of the body")
    call = JsonInferenceRequest(form, None, form.id, message=body, start=start)
    if form.json_inputs:
        call.add(form.json_inputs)
    return call


def _with_options(
    form: JsonRequestTemplate, header: dict[str, Any], refs: SharedMemoryRefs
) -> None:
    """Set the template's id, parameters and requested outputs."""
    if "id" in header:
        form.id = header["id"]
        if type(form.id) is not str:
            raise ValueError("id")
    parameters = header.get("parameters")
    if parameters is not None:
        for value in parameters.values():
            if type(value) not in (str, int, float, bool):
                raise ValueError("parameters")
        form.parameters = parameters
        form.others_binary = binary = parameters.get("binary_data_output", False)
        form.timeout_us = timeout = parameters.get("timeout", 0)
        form.top_k = top_k = parameters.get("top_k")
        if type(binary) is not bool or type(timeout) is not int or not 0 <= timeout < 2**63:
            raise ValueError("parameters")
        if top_k is not None and (type(top_k) is not int or top_k < 1):
            raise ValueError("top_k")
    wanted = header.get("outputs")
    if wanted is not None and type(wanted) is not list:
        raise TypeError("outputs")
    if wanted:
        for item in wanted:
            parameters = item.get("parameters")
            if parameters is None:
                parameters = _EMPTY
            binary = parameters.get("binary_data", form.others_binary)
            if type(binary) is not bool or not _REFUSED.isdisjoint(parameters):
                raise ValueError("outputs")
            name = item["name"]
            if not _PLACES.isdisjoint(parameters):
                refs.outputs[name] = parse_reference(name, parameters)
                binary = True
            form.binary[name] = binary
        if len(form.binary) != len(wanted):
            raise ValueError("duplicate output")
        form.outputs = tuple(form.binary)
