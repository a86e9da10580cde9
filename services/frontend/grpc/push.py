"""Messages of a stream sent without waiting for who reads it.

grpc's own way keeps a thread until the client has made room for the message: one that makes none keeps it for
good. Builds on ``grpc._server``, and is not to be used unless that is ``KNOWN`` (`inside.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from grpc import _server
from grpc._cython import cygrpc

_SEND = "send_message"  # grpc's name of what is due


def push(context: Any, message: bytes, sent: Callable[[], None]) -> None:
    """Begin to send ``message``, the only one under way of the call that has ``context``. ``sent`` is called
    when it is gone, on the server's own thread; not when the call has ended."""
    event, state = context._rpc_event, context._state
    with state.condition:
        if state.client is _server._CANCELLED or state.statused:
            return
        operations: list[Any] = [cygrpc.SendMessageOperation(message, 0)]
        if state.initial_metadata_allowed:
            operations.insert(0, _server._get_initial_metadata_operation(state, None))
            state.initial_metadata_allowed = False
        gone = _server._send_message(state, _SEND)

        def done(send_event: Any) -> Any:
            finished = gone(send_event)
            sent()
            return finished

        event.call.start_server_batch(operations, done)
        state.due.add(_SEND)
