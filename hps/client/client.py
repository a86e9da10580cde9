"""Clients for threads and for asyncio; both run the steps of `ClientOperations`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from hps.client.address import ServerAddress, Tls, address
from hps.client.calls import ClientOperations, Flow, SendStep
from hps.client.http_wire import HttpCodec
from hps.errors import HpsError

P = ParamSpec("P")
T = TypeVar("T")


def _opened(at: ServerAddress, api_key: str | None, *, aio: bool) -> tuple[Any, Any]:
    """Codec and transport of a client, such as a ``HttpCodec`` and a ``HttpConnectionPool``.

    Imports only the ones that it returns."""
    if at.is_grpc:
        from hps.client.grpc import AsyncGrpcChannel, GrpcChannel, GrpcCodec

        return GrpcCodec(api_key), AsyncGrpcChannel(at) if aio else GrpcChannel(at)
    wire = HttpCodec(at.base, api_key)
    if aio:
        from hps.client.rest_aio import AsyncHttpConnectionPool

        return wire, AsyncHttpConnectionPool(at)
    from hps.client.rest import HttpConnectionPool

    return wire, HttpConnectionPool(at)


class _ClientBase:
    """Base of both clients."""

    _aio = False

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        *,
        api_key: str | None = None,
        timeout_s: float = 30.0,
        retries: int = 2,
        tls: Tls | None = None,
    ) -> None:
        """Parse the address; the first call connects. Raises ``ConfigError``.

        ``url``: ``http://host:port`` or ``grpc://host:port`` as the server printed it at its start;
        ``https`` or ``grpcs`` for a server with certificates. ``timeout_s`` limits a call with all its
        retries. ``retries``: how often a call is retried while the server is unavailable. The pauses grow,
        and are never shorter than the server asks for."""
        at = address(url, tls)
        self.url = at.base
        wire, self._line = _opened(at, api_key, aio=self._aio)
        self._calls = ClientOperations(wire, timeout_s, retries)


def _blocking(
    flow: Callable[Concatenate[ClientOperations, P], Flow[T]],
) -> Callable[Concatenate[Client, P], T]:
    @wraps(flow)
    def ask(client: Client, /, *args: P.args, **given: P.kwargs) -> T:
        return client._run(flow(client._calls, *args, **given))

    return ask


class Client(_ClientBase):
    """Client of one server. Thread-safe.

    Every failure is an ``HpsError``: ``Unavailable`` if the server does not answer, ``DeadlineExceeded``
    if it does not answer in time, else the class that fits its reply."""

    predict = _blocking(ClientOperations.predict)
    lookup = _blocking(ClientOperations.lookup)
    infer = _blocking(ClientOperations.infer)
    metadata = _blocking(ClientOperations.metadata)
    config = _blocking(ClientOperations.config)
    ready = _blocking(ClientOperations.ready)
    about = _blocking(ClientOperations.about)
    is_hps = _blocking(ClientOperations.is_hps)
    models = _blocking(ClientOperations.models)

    def _run(self, flow: Flow[T]) -> T:
        try:
            step = next(flow)
            while True:
                try:
                    reply = self._do(step)
                except HpsError as error:
                    step = flow.throw(error)
                else:
                    step = flow.send(reply)
        except StopIteration as end:
            result: T = end.value
            return result

    def _do(self, step: SendStep | float) -> Any:
        if isinstance(step, SendStep):
            return self._line.send(*step)
        time.sleep(step)
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections permanently; idempotent."""
        self._calls.closed = True
        self._line.close()


def _awaited(
    flow: Callable[Concatenate[ClientOperations, P], Flow[T]],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    @wraps(flow)
    async def ask(client: AsyncClient, /, *args: P.args, **given: P.kwargs) -> T:
        return await client._run(flow(client._calls, *args, **given))

    return ask


class AsyncClient(_ClientBase):
    """``Client`` for asyncio: the same methods, awaited. Used on one event loop."""

    _aio = True

    predict = _awaited(ClientOperations.predict)
    lookup = _awaited(ClientOperations.lookup)
    infer = _awaited(ClientOperations.infer)
    metadata = _awaited(ClientOperations.metadata)
    config = _awaited(ClientOperations.config)
    ready = _awaited(ClientOperations.ready)
    about = _awaited(ClientOperations.about)
    is_hps = _awaited(ClientOperations.is_hps)
    models = _awaited(ClientOperations.models)

    async def _run(self, flow: Flow[T]) -> T:
        try:
            step = next(flow)
            while True:
                try:
                    reply = await self._do(step)
                except HpsError as error:
                    step = flow.throw(error)
                else:
                    step = flow.send(reply)
        except StopIteration as end:
            result: T = end.value
            return result

    async def _do(self, step: SendStep | float) -> Any:
        if isinstance(step, SendStep):
            return await self._line.send(*step)
        await asyncio.sleep(step)
        return None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections permanently; idempotent."""
        self._calls.closed = True
        await self._line.close()
