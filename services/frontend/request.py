"""Inference requests: from the bytes of a body to arrays, in one pass.

``parse`` trusts the request and takes whatever exception comes of it as the sign that something is
wrong; only then ``request_faults.explain`` looks at every field to say what. A wrong request is
never answered: each check of the slow pass has its counterpart in the fast one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from hps.errors import BadRequest
from services.frontend.datatypes import numbers
from services.frontend.errors import TooLarge
from services.frontend.request_faults import explain

_EMPTY: dict[str, Any] = {}
# What a damaged request may raise on the fast path.
_FAULTS = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError)


@dataclass(frozen=True, slots=True)
class InputRule:
    """What one named input of a model may be: ``dtypes`` by datatype; ``is_keys``: its elements count
    as keys of the request."""

    dtypes: Mapping[str, np.dtype[Any]]
    is_keys: bool = False


@dataclass(slots=True)
class Tensor:
    """One input: its elements ``(n,)``, flat and aligned, and the shape the request gave them."""

    flat: NDArray[Any]
    shape: list[int]


@dataclass(slots=True)
class InferCall:
    """A parsed request. ``outputs`` pairs each requested name with whether it goes out as binary;
    None means all of them, in the form ``binary`` says. ``timeout_us`` 0: the server's default.
    ``batch`` is filled in by the endpoint: samples, for statistics."""

    tensors: dict[str, Tensor]
    id: str = ""
    outputs: list[tuple[str, bool]] | None = None
    binary: bool = False
    timeout_us: int = 0
    top_k: int | None = None
    batch: int = 1


def parse(
    body: bytes,
    header_size: int | None,
    model: str,
    rules: Mapping[str, InputRule],
    max_keys: int,
) -> InferCall:
    """The request in ``body``, whose first ``header_size`` bytes are JSON (None: all of them).

    Raises ``BadRequest`` or ``TooLarge``. Arrays may share memory with ``body`` and be read-only.
    """
    try:
        return _parse(body, header_size, rules, max_keys)
    except _FAULTS as error:
        raise explain(body, header_size, model, rules, error) from None


def _parse(
    body: bytes, header_size: int | None, rules: Mapping[str, InputRule], max_keys: int
) -> InferCall:
    if header_size is None:
        header = orjson.loads(body)
        raw = b""
    else:
        # One copy aligns every tensor whose offset is a multiple of its element's size.
        header = orjson.loads(body[:header_size])
        raw = body[header_size:]
    offset, end, keys = 0, len(raw), 0
    tensors: dict[str, Tensor] = {}
    for item in header["inputs"]:
        name = item["name"]
        rule = rules[name]
        dtype = rule.dtypes[item["datatype"]]
        shape = item["shape"]
        if type(shape) is not list:
            raise TypeError("shape")
        count = 1
        for dim in shape:
            if type(dim) is not int or dim < 0:
                raise ValueError("shape")
            count *= dim
        parameters = item.get("parameters")
        size = None if parameters is None else parameters.get("binary_data_size")
        if size is None:
            flat = numbers(item["data"], dtype, count)
        else:
            if size != count * dtype.itemsize or offset + size > end or "data" in item:
                raise ValueError("binary_data_size")
            if offset % dtype.itemsize:
                flat = np.frombuffer(raw[offset : offset + size], dtype, count)
            else:
                flat = np.frombuffer(raw, dtype, count, offset)
            offset += size
        if rule.is_keys:
            keys += count
        if name in tensors:
            raise ValueError("duplicate")
        tensors[name] = Tensor(flat, shape)
    if offset != end:
        raise ValueError("additional data")
    if keys > max_keys:
        raise _too_many(keys, max_keys)
    return _with_options(InferCall(tensors), header)


def _with_options(call: InferCall, header: dict[str, Any]) -> InferCall:
    """Fill in what stands beside the inputs: id, parameters, requested outputs."""
    if "id" in header:
        call.id = header["id"]
        if type(call.id) is not str:
            raise ValueError("id")
    parameters = header.get("parameters")
    if parameters is not None:
        for value in parameters.values():
            if type(value) not in (str, int, float, bool):
                raise ValueError("parameters")
        call.binary = parameters.get("binary_data_output", False)
        call.timeout_us = timeout = parameters.get("timeout", 0)
        call.top_k = top_k = parameters.get("top_k")
        if type(call.binary) is not bool or type(timeout) is not int or not 0 <= timeout < 2**63:
            raise ValueError("parameters")
        if top_k is not None and (type(top_k) is not int or top_k < 1):
            raise ValueError("top_k")
    wanted = header.get("outputs")
    if wanted is not None and type(wanted) is not list:
        raise TypeError("outputs")
    if wanted:
        outputs = []
        for item in wanted:
            parameters = item.get("parameters")
            if parameters is None:
                parameters = _EMPTY
            binary = parameters.get("binary_data", call.binary)
            if type(binary) is not bool or "classification" in parameters:
                raise ValueError("outputs")
            outputs.append((item["name"], binary))
        if len(dict(outputs)) != len(outputs):
            raise ValueError("duplicate output")
        call.outputs = outputs
    return call


def raw_call(
    body: bytes, model: str, rules: Mapping[str, InputRule], max_keys: int, name: str | None
) -> InferCall:
    """A raw request (``Inference-Header-Content-Length: 0``): the body is input ``name``, one sample
    of as many elements as there are; every output comes back as binary.

    ``name`` is None for a model that takes more than one input.
    """
    if name is None:
        raise BadRequest(
            f"a raw request needs a model with exactly one input, '{model}' takes more; send the JSON "
            "header and Inference-Header-Content-Length"
        )
    # The model's own type: the first one of its rule.
    dtype = next(iter(rules[name].dtypes.values()))
    if len(body) % dtype.itemsize:
        raise BadRequest(
            f"unexpected size for input '{name}' of model '{model}': {len(body)} bytes are not a "
            f"multiple of {dtype.itemsize}"
        )
    count = len(body) // dtype.itemsize
    if rules[name].is_keys and count > max_keys:
        raise _too_many(count, max_keys)
    return InferCall({name: Tensor(np.frombuffer(body, dtype), [1, count])}, binary=True)


def _too_many(keys: int, max_keys: int) -> TooLarge:
    return TooLarge(
        f"the request carries {keys} keys, at most {max_keys} are taken; send smaller batches or raise "
        "server.max_keys"
    )
