"""Encoder of gRPC inference responses: from named arrays to a ``ModelInferResponse``, joined once.

All tensors are raw: Triton's Python client reads nothing else. A tensor written to a shared memory region has
an empty raw entry, as in Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2 as pb

from hps.bounded_memo import memoize
from services.frontend.datatypes import DATATYPE_OF
from services.frontend.endpoints import Output
from services.frontend.grpc.protobuf_wire import field, varint
from services.frontend.grpc.request import GrpcInferenceRequest, GrpcRequestTemplate

_ID, _RAW = 0x1A, 0x32  # tags of fields of ModelInferResponse
_NO_ELEMENTS = field(_RAW, b"")
_HEADS_KEPT = 64


class GrpcResponseEncoder:
    """Encodes the responses of one model version. Thread-safe."""

    def __init__(self, model: str, version: str) -> None:
        self._model, self._version = model, version

    def encode(
        self,
        call: GrpcInferenceRequest,
        defaulted: int,
        degraded: tuple[str, ...],
        stale_s: int,
        outputs: Sequence[Output],
    ) -> bytes:
        """Return the encoded response to ``call`` with ``outputs``.

        All but the ID and the elements is encoded once per template and output shapes.
        """
        heads = call.form.heads
        key = (defaulted, degraded, stale_s, *[array.shape for _, array in outputs])
        head = heads.get(key)
        if head is None:
            described = self._describe(call.form, defaulted, degraded, stale_s, outputs)
            head = described, [_raw_head(array) for _, array in outputs]
            memoize(heads, key, head, _HEADS_KEPT)
        described, raw_heads = head
        pieces: list[Any] = [described]
        if call.id:
            pieces.append(field(_ID, call.id.encode()))
        targets = call.targets
        for raw_head, (name, array) in zip(raw_heads, outputs, strict=True):
            if targets and name in targets:
                pieces.append(_NO_ELEMENTS)
            elif array.size:
                pieces += (
                    raw_head,
                    array if array.flags.c_contiguous else np.ascontiguousarray(array),
                )
            else:
                pieces.append(raw_head)
        return b"".join(pieces)

    def _describe(
        self,
        form: GrpcRequestTemplate,
        defaulted: int,
        degraded: tuple[str, ...],
        stale_s: int,
        outputs: Sequence[Output],
    ) -> bytes:
        places = {} if form.memory_refs is None else form.memory_refs.outputs
        response = pb.ModelInferResponse(model_name=self._model, model_version=self._version)
        response.parameters["hps_defaulted"].int64_param = defaulted
        response.parameters["hps_degraded"].string_param = ",".join(degraded)
        if stale_s:
            response.parameters["hps_stale_s"].int64_param = stale_s
        for name, array in outputs:
            tensor = response.outputs.add(name=name, datatype=_datatype(array), shape=array.shape)
            if name in places:
                place = places[name]._replace(size=array.nbytes)
                for parameter, value in place.parameters.items():
                    kind = "string_param" if isinstance(value, str) else "int64_param"
                    setattr(tensor.parameters[parameter], kind, value)
        head: bytes = response.SerializeToString()
        return head


def _raw_head(array: NDArray[Any]) -> bytes:
    """Return what precedes the elements of ``array``."""
    return b"%c%b" % (_RAW, varint(array.nbytes))


def _datatype(array: NDArray[Any]) -> str:
    return DATATYPE_OF[array.dtype.num]
