"""The shape of an ASGI application, of one that is a port's, and our one extension of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from services.frontend.http.head import RequestHead
    from services.frontend.http.inference import HttpInference
    from services.frontend.http.peer import ConnectionPeer
    from services.frontend.http.response import HttpReply

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

# An extension, and the type of its one message: ``reply`` is a whole ``HttpReply``.
WHOLE = "hps.response.whole"
EXTENSIONS: dict[str, Any] = {WHOLE: {}}
# A key of the scope of ours: takes what is to be called when the client hangs up before it is answered.
GONE = "hps.gone"


class PortApplication(Protocol):
    """What answers on a port. Beside ASGI's call it may `begin` requests that it knows by their heads; see
    `services.frontend.http.infer.InferApp`, and `PlainAsgi`, which knows none."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...

    def known(self, request: bytes) -> tuple[RequestHead | None, int]: ...

    def learn(self, scope: Mapping[str, Any], body_size: int, text: bytes) -> None: ...

    def begin(self, head: RequestHead, body: bytes, peer: ConnectionPeer) -> HttpInference: ...

    def early_refusal(self, scope: Mapping[str, Any]) -> HttpReply | None: ...

    def refusal(self, head: RequestHead, peer: ConnectionPeer) -> HttpReply | None: ...

    def refuse(self, head: RequestHead, error: Exception) -> HttpReply: ...


class PlainAsgi:
    """``app`` as an `PortApplication`."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    def known(self, request: bytes) -> tuple[RequestHead | None, int]:
        return None, 0

    def learn(self, scope: Mapping[str, Any], body_size: int, text: bytes) -> None: ...

    def begin(self, head: RequestHead, body: bytes, peer: ConnectionPeer) -> HttpInference:
        raise AssertionError("no head is known")

    def early_refusal(self, scope: Mapping[str, Any]) -> HttpReply | None:
        return None

    def refusal(self, head: RequestHead, peer: ConnectionPeer) -> HttpReply | None:
        return None

    def refuse(self, head: RequestHead, error: Exception) -> HttpReply:
        raise AssertionError("nothing is begun")
