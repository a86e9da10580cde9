"""Interface between a port's connections and its application."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from services.frontend.http.arriving_request import ArrivingRequest
from services.frontend.http.asgi import App, Receive, Scope, Send
from services.frontend.http.head import RequestHead
from services.frontend.http.inference import HttpInference
from services.frontend.http.peer import ConnectionPeer
from services.frontend.http.response import HttpReply


class PortApplication(Protocol):
    """The application of a port: ASGI, and a fast path for requests whose heads are `known`.

    Implemented by `services.frontend.http.inference_app.InferApp`, and by `PlainAsgi`, which knows no heads.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...

    def known(self, request: bytes) -> tuple[RequestHead | None, int]: ...

    def learn(self, scope: Mapping[str, Any], body_size: int, text: bytes) -> None: ...

    def begin(self, head: RequestHead, body: bytes, peer: ConnectionPeer) -> HttpInference: ...

    def expect(
        self, head: RequestHead, text: bytes, peer: ConnectionPeer
    ) -> ArrivingRequest | None: ...

    def early_refusal(self, scope: Mapping[str, Any]) -> HttpReply | None: ...

    def refusal(self, head: RequestHead, peer: ConnectionPeer) -> HttpReply | None: ...

    def refuse(self, head: RequestHead, error: Exception) -> HttpReply: ...


class PlainAsgi:
    """Adapts an ASGI ``app`` to `PortApplication`."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    def known(self, request: bytes) -> tuple[RequestHead | None, int]:
        return None, 0

    def learn(self, scope: Mapping[str, Any], body_size: int, text: bytes) -> None: ...

    def begin(self, head: RequestHead, body: bytes, peer: ConnectionPeer) -> HttpInference:
        raise AssertionError("no head is known")

    def expect(
        self, head: RequestHead, text: bytes, peer: ConnectionPeer
    ) -> ArrivingRequest | None:
        return None

    def early_refusal(self, scope: Mapping[str, Any]) -> HttpReply | None:
        return None

    def refusal(self, head: RequestHead, peer: ConnectionPeer) -> HttpReply | None:
        return None

    def refuse(self, head: RequestHead, error: Exception) -> HttpReply:
        raise AssertionError("no request has begun")
