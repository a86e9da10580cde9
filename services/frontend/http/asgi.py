"""The shape of an ASGI application, and our one extension of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

# An extension, and the type of its one message: ``reply`` is a whole ``Reply``.
WHOLE = "hps.response.whole"
EXTENSIONS: dict[str, Any] = {WHOLE: {}}
