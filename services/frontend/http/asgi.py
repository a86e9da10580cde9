"""Types of an ASGI application, and extensions of its scope and messages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

# An extension, and the type of its only message: ``reply`` is a whole ``HttpReply``.
WHOLE = "hps.response.whole"
EXTENSIONS: dict[str, Any] = {WHOLE: {}}
# A key of the scope: registers a callback for a client that disconnects before it has its answer.
GONE = "hps.gone"
