"""Explanation of faulty requests: the slow, careful twin of ``request.parse``.

It runs only after the fast pass failed, so it may check everything twice. Common messages follow Triton's
wording, which people search for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson

from hps.errors import BadRequest
from services.frontend import request_errors as faults
from services.frontend.datatypes import BINARY_ONLY, InputRule, flat, numbers
from services.frontend.errors import short_value
from services.frontend.shared_memory_refs import PARAMETERS, parse_reference, require_size

_REFERENCE_FIELDS = frozenset(PARAMETERS)


def explain(
    body: bytes,
    header_size: int | None,
    model: str,
    rules: Mapping[str, InputRule],
    error: Exception,
) -> BadRequest:
    """Return the first fault of the request in reading order; ``error`` is the fast pass's exception."""
    raw_size = 0 if header_size is None else len(body) - header_size
    try:
        header = _header(body if header_size is None else body[:header_size])
        _InputChecker(model, rules, raw_size).check(_inputs(header))
        _options(header)
    except BadRequest as fault:
        return fault
    return BadRequest(f"malformed inference request for model '{model}': {error}")


def _header(text: bytes) -> dict[str, Any]:
    try:
        header = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        hint = ""
        if b"NaN" in text or b"Infinity" in text:
            hint = "; NaN and Infinity are not JSON: send such tensors in binary form"
        raise BadRequest(f"failed to parse the request JSON buffer: {error}{hint}") from None
    if not isinstance(header, dict):
        raise BadRequest(f"the request must be a JSON object, got {short_value(header)}")
    return header


def _inputs(header: dict[str, Any]) -> list[Any]:
    if "inputs" not in header:
        raise BadRequest("the request has no 'inputs'")
    if not isinstance(header["inputs"], list):
        raise BadRequest(
            f"'inputs' must be an array of tensors, got {short_value(header['inputs'])}"
        )
    return header["inputs"]


class _InputChecker:
    """Checks the inputs of one request, of which ``raw_size`` bytes follow the JSON header."""

    def __init__(self, model: str, rules: Mapping[str, InputRule], raw_size: int) -> None:
        self._model, self._rules = model, rules
        self._raw_size = raw_size
        self._offset = 0  # of the next input's bytes
        self._names: set[str] = set()

    def check(self, items: list[Any]) -> None:
        """Raise the first fault of ``items``."""
        for position, item in enumerate(items):
            self._check_input(position, item)
        if self._offset != self._raw_size:
            raise BadRequest(
                f"unexpected additional input data for model '{self._model}': "
                f"{self._raw_size - self._offset} bytes follow the last tensor; are binary_data_size and "
                "Inference-Header-Content-Length right?"
            )

    def _check_input(self, position: int, item: Any) -> None:
        if not isinstance(item, dict):
            raise BadRequest(f"inputs[{position}] must be an object, got {short_value(item)}")
        name = item.get("name")
        if not isinstance(name, str):
            raise BadRequest(f"inputs[{position}] has no 'name' of type string")
        rule = self._rules.get(name)
        if rule is None:
            raise faults.unknown_input(name, self._model, self._rules)
        if name in self._names:
            raise faults.twice(name)
        self._names.add(name)
        dtype = _dtype(item, name, self._model, rule)
        count = _count(item, name, self._model)
        parameters = item.get("parameters")
        if parameters is not None and not isinstance(parameters, dict):
            raise BadRequest(f"the parameters of input '{name}' must be an object")
        parameters = {} if parameters is None else parameters
        if not _REFERENCE_FIELDS.isdisjoint(parameters):
            if "data" in item or parameters.get("binary_data_size") is not None:
                raise BadRequest(
                    f"input '{name}' has both data and a reference to shared memory; send one of them"
                )
            reference = parse_reference(name, parameters)
            require_size(name, reference, count * dtype.itemsize, self._model)
        elif (size := parameters.get("binary_data_size")) is not None:
            self._check_binary(item, name, size, count * dtype.itemsize)
        else:
            _data(item, name, item["datatype"], dtype, count)

    def _check_binary(self, item: dict[str, Any], name: str, size: Any, expected: int) -> None:
        """Check an input of ``expected`` bytes after the header, which announces ``size``."""
        if "data" in item:
            raise BadRequest(
                f"input '{name}' has both 'data' and 'binary_data_size'; send one of them"
            )
        if size != expected:
            raise BadRequest(
                f"unexpected size for input '{name}' of model '{self._model}': binary_data_size is "
                f"{short_value(size)}, shape {short_value(item['shape'])} of {item['datatype']} takes "
                f"{expected}"
            )
        self._offset += expected
        if self._offset > self._raw_size:
            raise BadRequest(
                f"unexpected size for input '{name}', expecting {self._offset - self._raw_size} additional "
                f"bytes for model '{self._model}': is the body truncated, or "
                "Inference-Header-Content-Length missing?"
            )


def _dtype(item: dict[str, Any], name: str, model: str, rule: InputRule) -> np.dtype[Any]:
    datatype = item.get("datatype")
    dtype = rule.dtypes.get(datatype) if isinstance(datatype, str) else None
    if dtype is None:
        raise faults.wrong_type(name, datatype, model, rule)
    return dtype


def _count(item: dict[str, Any], name: str, model: str) -> int:
    """Return the number of elements of the shape."""
    shape = item.get("shape")
    if (
        not isinstance(shape, list)
        or len(shape) > faults.MOST_DIMENSIONS
        or not all(type(d) is int and d >= 0 for d in shape)
    ):
        raise faults.wrong_shape(name, shape, model)
    count = 1
    for dim in shape:
        count *= dim
    return count


def _data(item: dict[str, Any], name: str, datatype: str, dtype: np.dtype[Any], count: int) -> None:
    if "data" not in item:
        raise BadRequest(
            f"input '{name}' has no data: give 'data', or 'binary_data_size' and the bytes after the "
            "JSON header"
        )
    if datatype in BINARY_ONLY:
        raise BadRequest(f"input '{name}': {datatype} can only be sent in binary form")
    try:
        numbers(item["data"], dtype, count)
    except OverflowError:
        raise _out_of_range(name, datatype) from None
    except TypeError:
        data = flat(item["data"])
        if dtype.kind in "iu" and type(data) is list and any(map(_is_beyond_64_bits, data)):
            raise _out_of_range(name, datatype) from None
        raise BadRequest(
            f"input '{name}': 'data' must be an array, flat or nested, of only {datatype} values, got "
            f"{short_value(item['data'])}"
        ) from None
    except ValueError:
        raise BadRequest(
            f"unexpected number of elements in 'data' of input '{name}': its shape "
            f"{short_value(item['shape'])} takes {count}"
        ) from None


def _is_beyond_64_bits(value: Any) -> bool:
    """Return True if ``value`` may be an integer that the JSON parser had to convert to a float."""
    return type(value) is float and value.is_integer() and abs(value) >= 2**63


def _out_of_range(name: str, datatype: str) -> BadRequest:
    return BadRequest(f"input '{name}' has a number out of range for {datatype}")


def _options(header: dict[str, Any]) -> None:
    if not isinstance(header.get("id", ""), str):
        raise BadRequest(f"'id' must be a string, got {short_value(header['id'])}")
    parameters = header.get("parameters")
    parameters = {} if parameters is None else parameters
    if not isinstance(parameters, dict):
        raise BadRequest(f"'parameters' must be an object, got {short_value(parameters)}")
    for key, value in parameters.items():
        if type(value) not in (str, int, float, bool):
            raise BadRequest(
                f"parameter {short_value(key)} must be a string, number or boolean, "
                f"got {short_value(value)}"
            )
    if type(parameters.get("binary_data_output", False)) is not bool:
        raise BadRequest("parameter 'binary_data_output' must be true or false")
    faults.checked_timeout(parameters.get("timeout", 0))
    faults.checked_top_k(parameters.get("top_k", 1))
    _outputs(header.get("outputs"))


def _outputs(wanted: Any) -> None:
    if wanted is None:
        return
    if not isinstance(wanted, list):
        raise BadRequest(f"'outputs' must be an array, got {short_value(wanted)}")
    seen = set()
    for position, item in enumerate(wanted):
        if not isinstance(item, dict) or not isinstance(item.get("name"), str):
            raise BadRequest(f"outputs[{position}] must be an object with a 'name'")
        name = item["name"]
        if name in seen:
            raise faults.output_twice(name)
        seen.add(name)
        parameters = item.get("parameters")
        parameters = {} if parameters is None else parameters
        if not isinstance(parameters, dict):
            raise BadRequest(f"the parameters of output '{name}' must be an object")
        if type(parameters.get("binary_data", False)) is not bool:
            raise BadRequest(f"parameter 'binary_data' of output '{name}' must be true or false")
        if "classification" in parameters:
            raise faults.classification(name)
        if not _REFERENCE_FIELDS.isdisjoint(parameters):
            parse_reference(name, parameters)
