"""The clients, for threads and for asyncio: each does in its own manner what `Calls` wants done."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from hps.client.address import Address, Tls, address
from hps.client.calls import Calls, Flow, Send
from hps.client.http_wire import HttpWire
from hps.errors import HpsError

P = ParamSpec("P")
T = TypeVar("T")


def _opened(at: Address, api_key: str | None, *, aio: bool) -> tuple[Any, Any]:
    """How calls are written and answers read, and what sends them: a ``HttpWire`` and a ``Http``, or what is
    like them. What is not used is not imported."""
    if at.is_grpc:
        from hps.client.grpc import AsyncGrpcChannel, GrpcChannel, GrpcWire

        return GrpcWire(api_key), AsyncGrpcChannel(at) if aio else GrpcChannel(at)
    wire = HttpWire(at.base, api_key)
    if aio:
        from hps.client.rest_aio import AsyncHttp

        return wire, AsyncHttp(at)
    from hps.client.rest import Http

    return wire, Http(at)


class _Opened:
    """What both clients are made of."""

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
        """``url``: ``http://host:port`` or ``grpc://host:port`` as the server printed it when it started,
        ``https`` and ``grpcs`` where it has certificates. ``timeout_s`` bounds a call with all its
        repetitions; ``retries``: how often it is repeated when the server is not available, after pauses
        that grow and are as long as the server asks for. Raises ``ConfigError``."""
        at = address(url, tls)
        self.url = at.base
        wire, self._line = _opened(at, api_key, aio=self._aio)
        self._calls = Calls(wire, timeout_s, retries)


def _blocking(
    flow: Callable[Concatenate[Calls, P], Flow[T]],
) -> Callable[Concatenate[Client, P], T]:
    @wraps(flow)
    def ask(client: Client, /, *args: P.args, **given: P.kwargs) -> T:
        return client._run(flow(client._calls, *args, **given))

    return ask


class Client(_Opened):
    """Asks one server. Any number of threads may use it. Every failure is an ``HpsError``: ``Unavailable``
    when nobody answers, ``DeadlineExceeded`` when nobody did in time, else the class that fits the server's
    reply."""

    predict = _blocking(Calls.predict)
    lookup = _blocking(Calls.lookup)
    infer = _blocking(Calls.infer)
    metadata = _blocking(Calls.metadata)
    config = _blocking(Calls.config)
    ready = _blocking(Calls.ready)
    about = _blocking(Calls.about)
    is_hps = _blocking(Calls.is_hps)
    models = _blocking(Calls.models)

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

    def _do(self, step: Send | float) -> Any:
        if isinstance(step, Send):
            return self._line.send(*step)
        time.sleep(step)
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections, for good; idempotent."""
        self._calls.closed = True
        self._line.close()


def _awaited(
    flow: Callable[Concatenate[Calls, P], Flow[T]],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    @wraps(flow)
    async def ask(client: AsyncClient, /, *args: P.args, **given: P.kwargs) -> T:
        return await client._run(flow(client._calls, *args, **given))

    return ask


class AsyncClient(_Opened):
    """``Client`` for asyncio: the same methods, awaited. Used on one event loop."""

    _aio = True

    predict = _awaited(Calls.predict)
    lookup = _awaited(Calls.lookup)
    infer = _awaited(Calls.infer)
    metadata = _awaited(Calls.metadata)
    config = _awaited(Calls.config)
    ready = _awaited(Calls.ready)
    about = _awaited(Calls.about)
    is_hps = _awaited(Calls.is_hps)
    models = _awaited(Calls.models)

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

    async def _do(self, step: Send | float) -> Any:
        if isinstance(step, Send):
            return await self._line.send(*step)
        await asyncio.sleep(step)
        return None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections, for good; idempotent."""
        self._calls.closed = True
        await self._line.close()
