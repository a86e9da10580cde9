"""The protocol over HTTP: encode calls as requests, decode replies. Tensors are binary both ways."""

from __future__ import annotations

import json
import re
from typing import Any
from urllib.parse import quote

import numpy as np

from hps.client.calls import InferCall
from hps.client.http_messages import Reply, Request, key_headers
from hps.client.trace import trace_headers
from hps.client.wire import Answer, decode_array, encode_array, numpy_type
from hps.errors import BadRequest, HpsError

_ID = re.compile(r"[\x20-\x7e]+")
_HEADER_SIZE = "Inference-Header-Content-Length"
_PATHS = {
    "server": "/v2",
    "ready": "/v2/health/ready",
    "metadata": "/v2/models/{}",
    "config": "/v2/models/{}/config",
    "models": "/v2/repository/index",
}


class HttpCodec:
    """Encodes one client's calls as requests, and decodes replies.

    Calls that differ only in their tensors' elements have the same request head, except for the request
    ID and the caller's trace, so that a server can recognise it."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self._url = url
        self._headers = key_headers(api_key)

    def query(self, kind: str, model: str) -> Request:
        path = _PATHS[kind].format(quote(model, safe=""))
        if kind == "models":
            return Request("POST", path, self._headers, b"{}")
        return Request("GET", path, self._headers)

    def decode(self, kind: str, reply: Reply) -> dict[str, Any]:
        """Decode the JSON of a reply. Triton reports readiness only by the status."""
        found = reply.json(self._url)
        if kind == "models":
            return {"models": found}
        return {"ready": True} if kind == "ready" else dict(found)

    def request(self, call: InferCall) -> Request:
        inputs: list[Any] = []
        tensors: list[Any] = []
        for name, value in call.inputs.items():
            datatype, tensor = encode_array(value)
            binary = {"binary_data_size": tensor.nbytes}
            inputs.append(
                {"name": name, "shape": value.shape, "datatype": datatype, "parameters": binary}
            )
            tensors.append(tensor.reshape(-1))
        parameters = dict(call.parameters)
        if call.timeout_s is not None:
            parameters["timeout"] = round(call.timeout_s * 1e6)
        head: dict[str, Any] = {"inputs": inputs, "parameters": parameters}
        if call.outputs is None:
            parameters["binary_data_output"] = True
        else:
            wanted = {"binary_data": True}
            head["outputs"] = [{"name": name, "parameters": wanted} for name in call.outputs]
        text = json.dumps(head).encode()
        sent = {**self._headers, _HEADER_SIZE: str(len(text)), **trace_headers()}
        if call.request_id:
            if not _ID.fullmatch(call.request_id):
                raise BadRequest(
                    f"request_id {call.request_id[:80]!r} must be printable ASCII characters"
                )
            sent["X-Request-ID"] = call.request_id
        path = f"/v2/models/{quote(call.model, safe='')}/infer"
        return Request("POST", path, sent, b"".join([text, *tensors]))

    def answer(self, reply: Reply) -> Answer:
        """Decode an answer; its arrays own their memory."""
        reply.checked(self._url)
        try:
            size = int(reply.headers.get(_HEADER_SIZE.lower(), len(reply.body)))
            head = json.loads(reply.body[:size])
            arrays = {}
            for out in head.get("outputs", []):
                arrays[out["name"]], size = _array(out, reply.body, size)
            return Answer(arrays, head.get("parameters") or {}, head.get("model_version", ""))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise HpsError(
                f"{self._url} sent an answer that violates the protocol ({error}); is it an hps "
                "server?"
            ) from None


def _array(out: dict[str, Any], body: bytes, start: int) -> tuple[Any, int]:
    """Decode an output; return it, and the position of the next one."""
    size = (out.get("parameters") or {}).get("binary_data_size")
    if size is None:
        return np.array(out["data"], numpy_type(out["datatype"])).reshape(out["shape"]), start
    end = start + size
    return decode_array(out["datatype"], body[start:end]).reshape(out["shape"]), end
