"""Requests in the protocol's HTTP form, byte by byte, and parsed answers."""

from __future__ import annotations

import http.client
import json
import zlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray
from tritonclient.utils import (
    deserialize_bytes_tensor,
    np_to_triton_dtype,
    serialize_byte_tensor,
    triton_to_np_dtype,
)

from hps.tools.conformance.target import CheckedServer, SampleRequest, note, require

LENGTH = "Inference-Header-Content-Length"
TIMEOUT_S = 30.0
# Servers answer an unknown content coding with 415, or fail to parse the JSON.
NO_CODING = (400, 415, 422)
# Types without a form in JSON.
BINARY_ONLY = {"FP16", "BF16"}


@dataclass(frozen=True)
class HttpResponse:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    def json(self) -> Any:
        """The body of a success."""
        require(self.status == 200, f"status {self.status}: {self.body[:300]!r}")
        try:
            return json.loads(self.body)
        except ValueError:
            require(False, f"no JSON: {self.body[:300]!r}")

    def refused(self, *statuses: int) -> str:
        """Return the text of an error with one of ``statuses``; note deviations."""
        wanted = " or ".join(map(str, statuses))
        # FastAPI answers 422 instead of 400.
        status = 400 if self.status == 422 else self.status
        note(status in statuses, f"{self.status} instead of {wanted}: {self.body[:300]!r}")
        if self.status < 400:
            return ""
        kind = self.headers.get("Content-Type", "")
        note(kind.startswith("application/json"), f"an error of the type {kind!r}")
        try:
            answer = json.loads(self.body)
        except ValueError:
            answer = None
        text = answer.get("error") if isinstance(answer, dict) else None
        good = isinstance(text, str) and text
        note(good, f'an error that is no {{"error"}}: {self.body[:300]!r}')
        return str(text)

    def head(self) -> Any:
        """The JSON of an inference's answer."""
        return self._parts()[0]

    def outputs(self) -> dict[str, NDArray[Any]]:
        """The tensors of an inference's answer."""
        return tensors_of(*self._parts())

    def _parts(self) -> tuple[Any, bytes]:
        require(self.status == 200, f"status {self.status}: {self.body[:300]!r}")
        body = self.body
        if (coding := self.headers.get("Content-Encoding")) in ("gzip", "deflate"):
            body = zlib.decompress(body, 31 if coding == "gzip" else 15)
        length = int(self.headers.get(LENGTH, len(body)))
        return json.loads(body[:length]), body[length:]


class HttpProbe:
    """A connection that is kept alive from one request to the next."""

    def __init__(self, target: CheckedServer) -> None:
        self._headers = target.headers
        self._binary = target.binary
        self._used = False
        host, _, port = target.http.rpartition(":")
        if target.http_tls is None:
            self._connection = http.client.HTTPConnection(host, int(port), timeout=TIMEOUT_S)
        else:
            self._connection = http.client.HTTPSConnection(
                host, int(port), timeout=TIMEOUT_S, context=target.http_tls.context()
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._connection.close()

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | Iterable[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> HttpResponse:
        """Send a request; a ``body`` in pieces is sent chunked.

        An answer is accepted even if it arrives before the server has read the whole body."""
        chunked = body is not None and not isinstance(body, bytes)
        sent = {**self._headers, **(headers or {})}
        if chunked:
            sent["Transfer-Encoding"] = "chunked"
        request = (method, path, body, sent)
        try:
            return self._answer(*request, encode_chunked=chunked)
        except ConnectionError:
            self._connection.close()
            if chunked or not self._used:  # the body is consumed, or nothing has been answered yet
                raise
        note(False, "it closed a connection without announcing it in the answer")
        return self._answer(*request)

    def _answer(self, *request: Any, **options: Any) -> HttpResponse:
        self._connection.request(*request, **options)
        response = self._connection.getresponse()
        self._used = True
        return HttpResponse(response.status, response.headers, response.read())

    def infer(
        self,
        model: str,
        body: bytes | Iterable[bytes],
        length: int | str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> HttpResponse:
        """Send an inference request; ``length``: of the JSON, if tensors follow it."""
        sent = {
            "Content-Type": "application/json" if length is None else "application/octet-stream"
        }
        if length is not None:
            sent[LENGTH] = str(length)
        return self.ask("POST", f"{path_of(model)}/infer", body, sent | dict(headers or {}))

    def send(self, sample: SampleRequest, **how: Any) -> HttpResponse:
        """Send ``sample`` as `request` encodes it; by default in binary form if the server has that."""
        return self.infer(sample.model, *self.request(sample, **how))

    def request(self, sample: SampleRequest, **how: Any) -> tuple[bytes, int | None]:
        return request(sample, **{"binary": self._binary, **how})

    def extensions(self) -> list[str]:
        return list(self.ask("GET", "/v2").json().get("extensions") or ())


def path_of(model: str) -> str:
    return f"/v2/models/{quote(model, safe='')}"


def request(
    sample: SampleRequest,
    *,
    binary: bool | Collection[str] = True,
    nested: bool = False,
    outputs: list[dict[str, Any]] | None = None,
    **rest: Any,
) -> tuple[bytes, int | None]:
    """A request's body, and the length of its JSON if tensors follow it.

    ``binary``: inputs in binary form; those that JSON cannot hold always are. ``outputs``: as in the
    request; by default all of the sample's, in the form of most of its inputs."""
    tensors, data = [], []
    for name, array in sample.inputs.items():
        tensor: dict[str, Any] = {
            "name": name,
            "shape": list(array.shape),
            "datatype": sample.datatype(name),
        }
        chosen = binary if isinstance(binary, bool) else name in binary
        if chosen or tensor["datatype"] in BINARY_ONLY:
            raw = encoded(array)
            tensor["parameters"] = {"binary_data_size": len(raw)}
            data.append(raw)
        else:
            values = array if nested else array.reshape(-1)
            tensor["data"] = values.tolist()
        tensors.append(tensor)
    if outputs is None:
        outputs = [
            {"name": name, "parameters": {"binary_data": bool(binary)}} for name in sample.outputs
        ]
    head = json.dumps({"inputs": tensors, "outputs": outputs, **rest}).encode()
    return head + b"".join(data), len(head) if data else None


def encoded(array: NDArray[Any]) -> bytes:
    if array.dtype == np.object_:
        made = serialize_byte_tensor(array)
        return made.item() if made.size else b""
    return array.tobytes()


def tensors_of(head: Any, data: bytes) -> dict[str, NDArray[Any]]:
    """The outputs of an answer's JSON ``head`` and of ``data``, which must have the exact length."""
    found, start = {}, 0
    for output in head["outputs"]:
        name, datatype, shape = output["name"], output["datatype"], output["shape"]
        size = (output.get("parameters") or {}).get("binary_data_size")
        if size is None:
            values = np.array(output["data"], triton_to_np_dtype(datatype)).reshape(-1)
        else:
            require("data" not in output, f"{name!r} comes twice: as data and in binary form")
            piece = data[start : start + size]
            require(len(piece) == size, f"{name!r}: {len(piece)} of {size} bytes received")
            start += size
            values = (
                deserialize_bytes_tensor(piece)
                if datatype == "BYTES"
                else np.frombuffer(piece, triton_to_np_dtype(datatype))
            )
        require(
            np_to_triton_dtype(values.dtype) == datatype and values.size == np.prod(shape),
            f"{name!r}: {values.size} elements for the shape {shape}",
        )
        found[name] = values.reshape(shape)
    require(start == len(data), f"{len(data) - start} bytes behind the last output")
    return found
