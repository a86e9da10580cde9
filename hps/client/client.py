"""Clients for threads and for asyncio: `ClientOperations` over blocking and over awaited transports."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from hps.client.address import ServerAddress, Tls, address
from hps.client.calls import ClientOperations
from hps.client.http_wire import HttpCodec

P = ParamSpec("P")
T = TypeVar("T")


def _open(at: ServerAddress, api_key: str | None, *, aio: bool) -> tuple[Any, Any]:
    """Codec and transport of a client, such as a ``HttpCodec`` and a ``HttpConnectionPool``.

    Imports only the ones that it returns."""
    if at.is_grpc:
        from hps.client.grpc import AsyncGrpcChannel, GrpcChannel, GrpcCodec

        return GrpcCodec(api_key), AsyncGrpcChannel(at) if aio else GrpcChannel(at)
    codec = HttpCodec(at.base, api_key)
    if aio:
        from hps.client.rest_aio import AsyncHttpConnectionPool

        return codec, AsyncHttpConnectionPool(at)
    from hps.client.rest import HttpConnectionPool

    return codec, HttpConnectionPool(at)


class AsyncClient(ClientOperations):
    """``Client`` for asyncio: the same methods, awaited. Used on one event loop."""

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        *,
        api_key: str | None = None,
        timeout_s: float = 30.0,
        retries: int = 2,
        tls: Tls | None = None,
    ) -> None:
        """See `Client`."""
        at = address(url, tls)
        self.url = at.base
        codec, transport = _open(at, api_key, aio=True)
        super().__init__(codec, transport, asyncio.sleep, timeout_s=timeout_s, retries=retries)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()


class _BlockingTransport:
    """A blocking transport as an awaited one: its coroutines never suspend."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport

    async def send(self, message: Any, until: float) -> Any:
        return self._transport.send(message, until)

    async def close(self) -> None:
        self._transport.close()


async def _sleep(seconds: float) -> None:
    time.sleep(seconds)


def _blocking(
    operation: Callable[Concatenate[ClientOperations, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Client, P], T]:
    @wraps(operation)
    def run(client: Client, /, *args: P.args, **options: P.kwargs) -> T:
        try:
            operation(client._operations, *args, **options).send(None)
        except StopIteration as end:
            result: T = end.value
            return result
        raise AssertionError("an operation suspended over a blocking transport")

    return run


class Client:
    """Client of one server. Thread-safe.

    Every failure is an ``HpsError``: ``Unavailable`` if the server does not answer, ``DeadlineExceeded``
    if it does not answer in time, else the class that fits its reply."""

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
        codec, self._transport = _open(at, api_key, aio=False)
        transport = _BlockingTransport(self._transport)
        self._operations = ClientOperations(
            codec, transport, _sleep, timeout_s=timeout_s, retries=retries
        )

    predict = _blocking(ClientOperations.predict)
    lookup = _blocking(ClientOperations.lookup)
    infer = _blocking(ClientOperations.infer)
    metadata = _blocking(ClientOperations.metadata)
    config = _blocking(ClientOperations.config)
    ready = _blocking(ClientOperations.ready)
    about = _blocking(ClientOperations.about)
    is_hps = _blocking(ClientOperations.is_hps)
    models = _blocking(ClientOperations.models)
    close = _blocking(ClientOperations.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()
