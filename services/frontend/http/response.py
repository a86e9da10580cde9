"""Encoder of REST inference responses: from named arrays to the bytes of a body, joined once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from hps.bounded_memo import memoize
from hps.errors import BadRequest
from services.frontend.datatypes import BINARY_ONLY, DATATYPE_OF
from services.frontend.endpoints import Output
from services.frontend.http.request import JsonInferenceRequest, JsonRequestTemplate

_JSON = orjson.OPT_SERIALIZE_NUMPY
_OCTETS = (b"content-type", b"application/octet-stream")
_TEXT = (b"content-type", b"application/json")
_HEADS_KEPT = 64

Headers = list[tuple[bytes, bytes]]


class HttpReply(NamedTuple):
    """An answer that is sent in one write.

    ``headers``: HTTP headers, Content-Length last where it may be compressed; ``lines``: the same as lines of
    a head. ``pieces``: the body, as bytes and C-contiguous arrays, none of them empty, of ``size`` bytes.
    """

    headers: Headers
    lines: bytes
    pieces: list[Any]
    size: int
    status: int = 200

    @staticmethod
    def make(headers: Headers, pieces: list[Any], size: int, status: int = 200) -> HttpReply:
        """Create a reply with the lines for its headers."""
        lines = b"".join([b"%b: %b\r\n" % header for header in headers])
        return HttpReply(headers, lines, pieces, size, status)

    def with_request_id(self, request_id: str) -> HttpReply:
        """Return a copy with ``X-Request-ID``, whose characters must be valid in a header."""
        header = b"x-request-id", request_id.encode()
        return HttpReply(
            [header, *self.headers], b"%b: %b\r\n%b" % (*header, self.lines), *self[2:]
        )

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)


class HttpResponseEncoder:
    """Encodes the responses of one model version."""

    def __init__(self, model: str, version: str) -> None:
        self._head = {"model_name": model, "model_version": version}

    def encode(
        self,
        call: JsonInferenceRequest,
        defaulted: int,
        degraded: tuple[str, ...],
        stale_s: int,
        outputs: Sequence[Output],
    ) -> HttpReply:
        """Return the answer to ``call`` with ``outputs``.

        Outputs of one template differ only in shape: while all are binary, the header written for the same
        shapes is reused. An output in shared memory is sent as its reference.
        """
        form = call.form
        key = (defaulted, degraded, stale_s, *[array.shape for _, array in outputs])
        kept = form.heads.get(key)
        if kept is not None:
            headers, lines, text, size = kept
            return HttpReply(headers, lines, [text, *_filled(outputs, form)], size)
        text = self._describe(form, defaulted, degraded, stale_s, outputs)
        binary = [output for output in outputs if form.is_binary(output[0])]
        arrays = _filled(binary, form)
        headers, size = [_TEXT], len(text) + sum(array.nbytes for array in arrays)
        if arrays:
            headers = [_OCTETS, (b"inference-header-content-length", b"%d" % len(text))]
        headers.append((b"content-length", b"%d" % size))
        reply = HttpReply.make(headers, [text, *arrays], size)
        if outputs and len(binary) == len(outputs):
            memoize(form.heads, key, (headers, reply.lines, text, size), _HEADS_KEPT)
        return reply

    def _describe(
        self,
        form: JsonRequestTemplate,
        defaulted: int,
        degraded: tuple[str, ...],
        stale_s: int,
        outputs: Sequence[Output],
    ) -> bytes:
        """Return the JSON header.

        Numbers that are not finite become ``null`` in JSON, which cannot express them, and are counted in the
        response parameter ``hps_not_finite``; binary tensors carry them unchanged.
        """
        parameters: dict[str, Any] = {
            "hps_defaulted": defaulted,
            "hps_degraded": ",".join(degraded),
        }
        if stale_s:
            parameters["hps_stale_s"] = stale_s
        places = {} if form.memory_refs is None else form.memory_refs.outputs
        described = []
        for name, array in outputs:
            datatype = DATATYPE_OF[array.dtype.num]
            tensor: dict[str, Any] = {"name": name, "datatype": datatype, "shape": array.shape}
            if name in places:
                tensor["parameters"] = places[name]._replace(size=array.nbytes).parameters
            elif form.is_binary(name):
                tensor["parameters"] = {"binary_data_size": array.nbytes}
            else:
                tensor["data"] = _data(name, datatype, array, parameters)
            described.append(tensor)
        header: dict[str, Any] = dict(self._head)
        if form.id:
            header["id"] = form.id
        header["parameters"] = parameters
        header["outputs"] = described
        return orjson.dumps(header, option=_JSON)


def _filled(outputs: Sequence[Output], form: JsonRequestTemplate) -> list[NDArray[Any]]:
    """Return the arrays to send, C-contiguous: those with elements that are not in shared memory."""
    if form.memory_refs is not None:
        outputs = [output for output in outputs if output[0] not in form.memory_refs.outputs]
    return [
        array if array.flags.c_contiguous else np.ascontiguousarray(array)
        for _, array in outputs
        if array.size
    ]


def _data(name: str, datatype: str, array: Any, parameters: dict[str, Any]) -> Any:
    """Return the elements for JSON, flat; count those that become null in ``parameters``."""
    if datatype in BINARY_ONLY:
        raise BadRequest(
            f"output '{name}' is {datatype}, which can only be sent in binary form: set its parameter "
            "'binary_data', or 'binary_data_output' for all"
        )
    if array.dtype.kind == "f":
        lost = array.size - int(np.count_nonzero(np.isfinite(array)))
        if lost:
            parameters["hps_not_finite"] = parameters.get("hps_not_finite", 0) + lost
    return np.ascontiguousarray(array).reshape(-1)
