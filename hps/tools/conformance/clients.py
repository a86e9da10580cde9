"""Triton's own clients, unchanged: by HTTP and gRPC, for threads and for asyncio."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
from tritonclient.utils import InferenceServerException

from hps.client import Tls
from hps.tools.conformance.grpc_wire import GrpcProbe, credentials, is_raw, request
from hps.tools.conformance.http_wire import NO_CODING, HttpProbe
from hps.tools.conformance.target import (
    CheckedServer,
    CheckSuite,
    Deviation,
    SampleRequest,
    needs,
    require,
    same,
)

_BINARY = "binary_tensor_data"
HTTP, GRPC = CheckSuite("http"), CheckSuite("grpc")


class _BlockingClient:
    """An asyncio client with blocking calls, on an event loop of this object."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._loop = asyncio.new_event_loop()
        self._client = self._run(make)

    def _run(self, make: Callable[[], Any]) -> Any:
        async def made() -> Any:
            return make()

        return self._loop.run_until_complete(made())

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._client, name)
        return lambda *args, **options: self._loop.run_until_complete(call(*args, **options))

    def close(self) -> None:
        async def end() -> None:
            await self._client.close()
            await asyncio.sleep(
                0.05
            )  # health calls leave bodies unread; reading them frees the connection

        self._loop.run_until_complete(end())
        self._loop.close()


@contextmanager
def _closing(client: Any) -> Iterator[Any]:
    try:
        yield client
    finally:
        client.close()


def _drive(kind: Any, client: Any, target: CheckedServer, **forms: Any) -> None:
    """Call every method of a client; ``forms`` are further ways of sending a request."""
    headers = dict(target.headers)
    require(client.is_server_live(headers=headers), "not live")
    require(client.is_server_ready(headers=headers), "not ready")
    about = client.get_server_metadata(headers=headers)
    extensions = about["extensions"] if isinstance(about, dict) else about.extensions
    for sample in target.samples:
        require(client.is_model_ready(sample.model, headers=headers), f"{sample.model} not ready")
        require(client.get_model_metadata(sample.model, headers=headers), "no metadata")
        if "model_configuration" in extensions:
            require(client.get_model_config(sample.model, headers=headers), "no configuration")
        inputs, outputs = _tensors(kind, sample)
        ask: dict[str, Any] = {"outputs": outputs, "request_id": "r-7"}
        result = client.infer(sample.model, inputs, **ask, headers={**headers})
        expected = {name: result.as_numpy(name) for name in sample.outputs}
        head = result.get_response()
        found = head["id"] if isinstance(head, dict) else head.id
        require(found == "r-7", f"id {found!r}")
        for name, options in forms.items():
            # The client adds content codings to the headers that it receives.
            result = client.infer(sample.model, inputs, **ask, **options, headers={**headers})
            same({n: result.as_numpy(n) for n in sample.outputs}, expected, name)
    if "statistics" in extensions:
        require(client.get_inference_statistics(headers=headers), "no statistics")
    if "model_repository" in extensions:
        require(client.get_model_repository_index(headers=headers), "no index")
    try:
        client.infer("none", inputs, headers=headers)
    except InferenceServerException as error:
        require(error.status() in ("404", "StatusCode.NOT_FOUND"), f"status {error.status()}")
        require("none" in error.message(), f"an error without the model's name: {error.message()}")
    else:
        raise Deviation("an unknown model answers")


def _tensors(kind: Any, sample: SampleRequest) -> tuple[list[Any], list[Any]]:
    inputs = []
    for name, array in sample.inputs.items():
        tensor = kind.InferInput(name, list(array.shape), sample.datatype(name))
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return inputs, [kind.InferRequestedOutput(name) for name in sample.outputs]


_CODED = {
    f"{coding}, {way}": {f"{way}_compression_algorithm": coding}
    for coding in ("gzip", "deflate")
    for way in ("request", "response")
}


def _codings(target: CheckedServer) -> dict[str, Any]:
    """The arguments in ``_CODED`` whose coding the server accepts for bodies."""
    with HttpProbe(target) as http:
        body, length = http.request(target.sample)
        head = {"Content-Encoding": "gzip"}
        answer = http.infer(target.sample.model, gzip.compress(body), length, head)
    taken = answer.status not in NO_CODING
    return {name: how for name, how in _CODED.items() if taken or "response" in name}


_CALL_CODED = {coding: {"compression_algorithm": coding} for coding in ("gzip", "deflate")}


def _http(target: CheckedServer) -> dict[str, Any]:
    """Arguments of tritonclient.http for certificates."""
    if target.http_tls is None:
        return {}
    return {"ssl": True, "ssl_context_factory": _gevent_context(target.http_tls)}


def _gevent_context(tls: Tls) -> Callable[..., Any]:
    """An SSL context for gevent's sockets, on which the client waits."""
    import gevent.ssl

    def make(**_defaults: Any) -> Any:
        context = gevent.ssl.create_default_context(cafile=tls.ca_file)
        if tls.certificate_file is not None:
            context.load_cert_chain(tls.certificate_file, tls.key_file)
        return context

    return make


def _http_aio(target: CheckedServer) -> dict[str, Any]:
    tls = target.http_tls
    return {} if tls is None else {"ssl": True, "ssl_context": tls.context()}


def _grpc(target: CheckedServer) -> dict[str, Any]:
    tls = target.grpc_tls
    return {} if tls is None else {"creds": credentials(tls)}


def _needs_raw(target: CheckedServer) -> None:
    with GrpcProbe(target) as ask:
        raw = is_raw(ask.ask("ModelInfer", request(target.sample)))
        needs(raw or _BINARY in ask.extensions(), _BINARY)


@HTTP.check
def tritonclient_http(target: CheckedServer) -> None:
    """tritonclient.http"""
    needs(target.binary, _BINARY)
    kind = tritonclient.http
    with _closing(kind.InferenceServerClient(target.http, **_http(target))) as client:
        _drive(kind, client, target, **_codings(target))
        inputs, outputs = _tensors(kind, target.sample)
        ask: dict[str, Any] = {"outputs": outputs, "headers": dict(target.headers)}
        expected = client.infer(target.sample.model, inputs, **ask)
        later = client.async_infer(target.sample.model, inputs, **ask).get_result()
        for name in target.sample.outputs:
            same({name: later.as_numpy(name)}, {name: expected.as_numpy(name)}, "async_infer")


@HTTP.check
def tritonclient_http_aio(target: CheckedServer) -> None:
    """tritonclient.http.aio"""
    needs(target.binary, _BINARY)
    kind = tritonclient.http.aio
    make = partial(kind.InferenceServerClient, target.http, **_http_aio(target))
    with _closing(_BlockingClient(make)) as client:
        _drive(kind, client, target, **_codings(target))


@GRPC.check
def tritonclient_grpc(target: CheckedServer) -> None:
    """tritonclient.grpc"""
    _needs_raw(target)
    kind = tritonclient.grpc
    with _closing(kind.InferenceServerClient(target.grpc, **_grpc(target))) as client:
        _drive(kind, client, target, **_CALL_CODED)


@GRPC.check
def tritonclient_grpc_aio(target: CheckedServer) -> None:
    """tritonclient.grpc.aio"""
    _needs_raw(target)
    kind = tritonclient.grpc.aio
    make = partial(kind.InferenceServerClient, target.grpc, **_grpc(target))
    with _closing(_BlockingClient(make)) as client:
        _drive(kind, client, target, **_CALL_CODED)
