"""Transport to Triton over HTTP."""

from __future__ import annotations

import json
import time
from base64 import b64encode
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from typing import Any
from urllib.parse import quote

from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException

from hps.client.address import Tls, address
from hps.client.http_messages import Reply, Request
from hps.client.rest import HttpConnectionPool
from hps.dense.triton.transport import (
    CudaSharedMemory,
    SharedMemoryTensors,
    TritonModelInfo,
    info_of,
    microseconds,
    output_arrays_of,
    request_headers,
    tensors_in,
    tensors_out,
    translate_triton_error,
)
from hps.errors import DeadlineExceeded

_HEADER_LENGTH = "inference-header-content-length"


class HttpTransport:
    """A `TritonTransport` over HTTP, with the messages of Triton's client but our connections.

    The client's own connections belong to one thread each, and have no deadline for a whole call."""

    def __init__(self, url: str, model: str, version: str, tls: Tls | None = None) -> None:
        """``tls`` None: plain text. Raises ConfigError for certificates that cannot be used."""
        from tritonclient import http

        self._http = http
        scheme = "http" if tls is None else "https"
        self._connections = HttpConnectionPool(address(f"{scheme}://{url}", tls))
        self._model = f"/v2/models/{quote(model, safe='')}" + (version and f"/versions/{version}")
        self._name = model

    def describe(self, timeout_s: float) -> TritonModelInfo:
        until = time.monotonic() + timeout_s
        about, config = (
            json.loads(
                self._send(
                    "GET", self._model + path, until - time.monotonic(), describing=self._name
                ).body
            )
            for path in ("", "/config")
        )
        return TritonModelInfo(
            tuple(info_of(t["name"], t["datatype"], t["shape"]) for t in about["inputs"]),
            tuple(info_of(t["name"], t["datatype"], t["shape"]) for t in about["outputs"]),
            config["max_batch_size"],
        )

    def infer(
        self,
        inputs: Sequence[tuple[str, str, NDArray[Any]]],
        outputs: Sequence[str],
        timeout_s: float,
        shared: SharedMemoryTensors | None = None,
    ) -> dict[str, NDArray[Any]]:
        client = self._http.InferenceServerClient
        request_id, headers = request_headers()
        body, length = client.generate_request_body(
            tensors_in(self._http, inputs, shared),
            outputs=tensors_out(self._http, outputs, shared),
            request_id=request_id,
            timeout=microseconds(timeout_s),
        )
        if length is not None:
            headers[_HEADER_LENGTH] = str(length)
        reply = self._send("POST", f"{self._model}/infer", timeout_s, body, headers)
        size = reply.headers.get(_HEADER_LENGTH)
        result = client.parse_response_body(
            reply.body, header_length=None if size is None else int(size)
        )
        return output_arrays_of(result, outputs, shared)

    def register(
        self, region: str, key: str | CudaSharedMemory, size: int, timeout_s: float
    ) -> None:
        about: dict[str, Any] = {"key": key, "offset": 0, "byte_size": size}
        if isinstance(key, CudaSharedMemory):
            handle = {"b64": b64encode(key.handle).decode()}
            about = {"raw_handle": handle, "device_id": key.device, "byte_size": size}
        path = f"{_shared(key)}/region/{region}/register"
        self._send("POST", path, timeout_s, json.dumps(about).encode())

    def unregister(self, region: str, key: str | CudaSharedMemory, timeout_s: float) -> None:
        self._send("POST", f"{_shared(key)}/region/{region}/unregister", timeout_s, b"")

    def close(self) -> None:
        """Close the connections, since a stopping Triton waits for open ones."""
        self._connections.close()

    def _send(
        self,
        method: str,
        path: str,
        timeout_s: float,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        describing: str | None = None,
    ) -> Reply:
        request = Request(method, path, headers or {}, body)
        try:
            reply = self._connections.exchange(request, time.monotonic() + timeout_s)
        except DeadlineExceeded:
            raise translate_triton_error(TimeoutError()) from None
        except HTTPException as error:
            raise translate_triton_error(
                ConnectionError(f"{type(error).__name__}: {error}")
            ) from None
        except Exception as error:
            raise translate_triton_error(error, describing) from None
        if reply.status != 200:
            refusal = InferenceServerException(_error(reply), str(reply.status))
            raise translate_triton_error(refusal, describing)
        return reply


def _shared(key: str | CudaSharedMemory) -> str:
    return f"/v2/{'cuda' if isinstance(key, CudaSharedMemory) else 'system'}sharedmemory"


def _error(reply: Reply) -> str:
    try:
        return str(json.loads(reply.body)["error"])
    except (ValueError, KeyError, TypeError):
        return reply.body.decode(errors="replace") or f"status {reply.status} without a text"
