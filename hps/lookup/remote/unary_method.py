"""gRPC unary calls with a callback instead of grpc's future.

A future costs a condition variable, a list of callbacks and several locks, for a call that no thread
waits for. The callback uses private parts of grpc. ``KNOWN`` is True if they are as expected; otherwise
futures are used."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import grpc
from grpc._cython import cygrpc

log = logging.getLogger(__name__)

_Code = grpc.StatusCode
OnDone = Callable[[grpc.StatusCode, str, Any], None]
"""``on_done(status, details, response)``: the parsed response if the status is OK, else None."""
Cancel = Callable[[], object]

_CODES = {code.value[0]: code for code in _Code}
_CLOSE = cygrpc.SendCloseFromClientOperation(0)
_TAKES = [
    "flags",
    "method",
    "host",
    "deadline",
    "metadata",
    "credentials",
    "operations",
    "event_handler",
    "context",
    "_registered_call_handle",
]


def _is_known() -> bool:
    try:
        with grpc.insecure_channel("127.0.0.1:1") as channel:
            method: Any = channel.unary_unary("/known")
            takes = [*inspect.signature(method._managed_call).parameters]
            return takes == _TAKES and all(
                hasattr(method, name) for name in ("_method", "_context", "_registered_call_handle")
            )
    except AttributeError:
        return False


KNOWN = _is_known()


class UnaryMethod:
    """Starts calls of one gRPC method. Thread-safe.

    ``on_done`` is called once per call, on a thread of gRPC. Raises ValueError if the channel is closed."""

    def __init__(self, channel: grpc.Channel, method: str, parse: Callable[[bytes], Any]) -> None:
        self._method: Any = channel.unary_unary(method)
        self._parse = parse
        self.start: Callable[[bytes, float, Sequence[tuple[str, str]], OnDone], Cancel]
        """``start(message, timeout_s, metadata, on_done)`` starts a call; returns its cancel function."""
        self.start = self._start if KNOWN else self._start_future

    def _start(
        self, message: bytes, timeout_s: float, metadata: Sequence[tuple[str, str]], on_done: OnDone
    ) -> Cancel:
        method = self._method
        received = cygrpc.ReceiveMessageOperation(0)
        status = cygrpc.ReceiveStatusOnClientOperation(0)
        operations = (
            cygrpc.SendInitialMetadataOperation(tuple(metadata), 0),
            cygrpc.SendMessageOperation(message, 0),
            _CLOSE,
            cygrpc.ReceiveInitialMetadataOperation(0),
            received,
            status,
        )

        def ended(_event: Any) -> bool:
            self._report(
                on_done, _CODES.get(status.code(), _Code.UNKNOWN), status.details(), received
            )
            return True

        call = method._managed_call(
            cygrpc.PropagationConstants.GRPC_PROPAGATE_DEFAULTS,
            method._method,
            None,
            time.time() + timeout_s,
            None,
            None,
            (operations,),
            ended,
            method._context,
            method._registered_call_handle,
        )
        return partial(call.cancel, cygrpc.StatusCode.cancelled, "cancelled")

    def _report(self, on_done: OnDone, code: grpc.StatusCode, details: Any, received: Any) -> None:
        try:
            text = details if isinstance(details, str) else bytes(details or b"").decode()
            parsed = None
            if code is _Code.OK:
                try:
                    parsed = self._parse(received.message())
                except Exception as error:  # the class of protobuf's error depends on its build
                    code, text = _Code.INTERNAL, f"invalid response: {error}"
            on_done(code, text, parsed)
        except Exception:  # an error would end gRPC's thread, which serves all calls
            log.exception("handling the result of a gRPC call failed")

    def _start_future(
        self, message: bytes, timeout_s: float, metadata: Sequence[tuple[str, str]], on_done: OnDone
    ) -> Cancel:
        call = self._method.future(message, timeout=timeout_s, metadata=metadata)
        call.add_done_callback(
            lambda _: self._report(on_done, call.code(), call.details(), _FutureEvent(call))
        )
        return call.cancel  # type: ignore[no-any-return]  # grpc has no types


class _FutureEvent:
    """A grpc future with the interface that `UnaryMethod` reads messages from."""

    def __init__(self, call: Any) -> None:
        self.message = call.result
