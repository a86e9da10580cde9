"""Inference responses: from named arrays to the bytes of a body, joined once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import orjson

from hps.errors import BadRequest
from services.frontend.datatypes import BINARY_ONLY, DATATYPE_OF
from services.frontend.endpoints import Output

_JSON = orjson.OPT_SERIALIZE_NUMPY
Headers = list[tuple[bytes, bytes]]


def encode(
    model: str,
    version: str,
    request_id: str,
    defaulted: int,
    degraded: tuple[str, ...],
    outputs: Iterable[Output],
) -> tuple[bytes, int]:
    """The body, and the length of its JSON header (0: all of it is JSON).

    Numbers that are not finite become ``null`` in JSON, which knows no others, and are counted in
    the response parameter ``hps_not_finite``; binary tensors carry them as they are.
    """
    described: list[dict[str, Any]] = []
    chunks: list[Any] = [b""]
    parameters: dict[str, Any] = {"hps_defaulted": defaulted, "hps_degraded": ",".join(degraded)}
    for name, binary, array in outputs:
        datatype = DATATYPE_OF[array.dtype.num]
        if binary:
            size = array.nbytes
            described.append(
                {
                    "name": name,
                    "datatype": datatype,
                    "shape": array.shape,
                    "parameters": {"binary_data_size": size},
                }
            )
            if size:
                chunks.append(array if array.flags.c_contiguous else np.ascontiguousarray(array))
        else:
            if datatype in BINARY_ONLY:
                raise BadRequest(
                    f"output '{name}' is {datatype}, which can only be sent in binary form: set its "
                    "parameter 'binary_data', or 'binary_data_output' for all"
                )
            if array.dtype.kind == "f":
                finite = np.count_nonzero(np.isfinite(array))
                if finite != array.size:
                    lost = parameters.get("hps_not_finite", 0)
                    parameters["hps_not_finite"] = lost + array.size - int(finite)
            described.append(
                {
                    "name": name,
                    "datatype": datatype,
                    "shape": array.shape,
                    "data": np.ascontiguousarray(array).reshape(-1),
                }
            )
    header: dict[str, Any] = {"model_name": model, "model_version": version}
    if request_id:
        header["id"] = request_id
    header["parameters"] = parameters
    header["outputs"] = described
    chunks[0] = text = orjson.dumps(header, option=_JSON)
    if len(chunks) == 1:
        return text, 0
    return b"".join(chunks), len(text)
