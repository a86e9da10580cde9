"""gRPC calls taken up once their request is there, and answered on the thread that received it if possible.

grpc's threaded server hands each call to a thread, which then waits until the server's own thread has
received the request: a client that sends none keeps a thread, and every answer costs the interpreter's lock
three changes of hands (26 keys: 390 µs of CPU, 200 without them).

Builds on ``grpc._server``, which is not grpc's public interface: ``KNOWN`` says whether it is as expected.
Where it is not, calls run on threads as grpc has them.
"""

from __future__ import annotations

import inspect
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import grpc
from grpc import _server
from grpc._cython import cygrpc

from hps.config.auth import Role
from hps.errors import HpsError
from services.frontend.grpc.behaviors import Direct
from services.frontend.grpc.ending import Trailers, ending_of
from services.frontend.grpc.looking import Looking
from services.frontend.grpc.unsent import NOTED, Unsent

log = logging.getLogger(__name__)

_RECEIVE, _SEND = "receive_message", "send_status_from_server"  # grpc's names of what is due
# Requests beyond so many bytes are parsed on other threads, of which there are so many.
_LARGE, _LARGE_AT_ONCE = 65_536, 32
# How long a request may take to come; looked at so often.
_PATIENCE_S, _LOOK_S = 60.0, 1.0
# Who calls is looked at again when the request came so long after its call: a key may be no longer good.
_KNOWN_S = 1.0
_MOST_DETAILS = 2048
_EXPECTED = {
    "_unary_response_in_pool": [
        "rpc_event",
        "state",
        "behavior",
        "argument_thunk",
        "request_deserializer",
        "response_serializer",
    ],
    "_receive_message": ["state", "call", "request_deserializer"],
    "_send_message": ["state", "token"],
    "_send_status_from_server": ["state", "token"],
    "_get_initial_metadata_operation": ["state", "metadata"],
    "_abort": ["state", "call", "code", "details"],
    "_Context": ["rpc_event", "state", "request_deserializer"],
}


def _known() -> bool:
    return all(
        list(inspect.signature(getattr(_server, name, dict)).parameters) == parameters
        for name, parameters in _EXPECTED.items()
    ) and (
        hasattr(_server, "_CANCELLED")
        and {"due", "request", "statused", "client", "condition", "initial_metadata_allowed"}
        <= vars(_server._RPCState()).keys()
    )


KNOWN = _known()
_RLock: Any = type(threading.RLock())


class _Guarded(_RLock):  # type: ignore[misc]
    """In place of a call's condition where nobody waits for it: a third of its cost."""

    __slots__ = ()

    def notify_all(self) -> None: ...


May = Callable[[grpc.ServicerContext, Role], str | None]
"""Who calls; None when they may not do what needs a role."""


class Arrivals(ThreadPoolExecutor):
    """Takes unary calls from grpc. Those of a ``Direct`` behavior begin on the server's own thread, and large
    ones go on on others, since nothing else is received meanwhile; what is not ``Direct`` runs on ``pool``,
    which never waits for a request. Calls whose request does not come for ``_PATIENCE_S`` are ended; those of
    callers who may not make them are not received at all: a message can be large."""

    def __init__(self, pool: ThreadPoolExecutor, most: int, may: May | None = None) -> None:
        """``most`` ``Direct`` calls are taken at a time; others share what grpc takes beyond them. ``may``
        says who may call; None: everybody."""
        # Its own threads are for what would hold up the server's.
        super().__init__(_LARGE_AT_ONCE, "grpc-large")
        self._pool = pool
        self._most = most
        self._may = may
        self.open: set[_Call] = set()  # those of a ``Direct`` behavior
        self._expected: dict[_Call, float] = {}  # calls without a request, and since when
        self._looking = Looking(self._end_late, lambda: _LOOK_S, "grpc-expected")
        self.unsent = Unsent()
        if not KNOWN:
            log.warning(
                "grpc %s is not as expected inside: calls run on its threads, which is slower",
                grpc.__version__,
            )

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if len(args) != 7:
            return self._pool.submit(fn, *args, **kwargs)
        if not KNOWN:
            if isinstance(args[3], Direct):
                return super().submit(fn, *args, **kwargs)
            return self._pool.submit(fn, *args, **kwargs)
        in_pool, event, state, behavior, _, deserializer, serializer = args
        call = _Call(event, state, self)
        if isinstance(behavior, Direct):
            state.condition = _Guarded()  # no other thread has seen the call yet
            if len(self.open) >= self._most:
                call.abort(
                    cygrpc.StatusCode.resource_exhausted,
                    f"{self._most} calls are under way, which is all that is taken; retry later, or ask "
                    "another replica",
                )
                return call  # type: ignore[return-value]  # grpc takes it for a future, as below
            self.open.add(call)
        role = getattr(behavior, "role", None)  # health's are grpc's own
        if self._may and role:
            call.caller = self._may(call.context, role)
            if call.caller is None:
                if isinstance(behavior, Direct):
                    behavior.begin(b"", call)
                else:
                    nothing = partial(deserializer or bytes, b"")
                    refused = self._pool.submit(
                        fn, in_pool, event, state, behavior, nothing, None, serializer
                    )
                    refused.add_done_callback(call.ended)
                return call  # type: ignore[return-value]  # as below
        received = _server._receive_message(state, event.call, deserializer)

        def begin(message_event: Any) -> Any:
            finished = received(message_event)
            request, state.request = state.request, None
            try:
                since = self._expected.pop(call, None)
                if since is None:
                    return finished  # it came too late
                if time.monotonic() - since > _KNOWN_S:
                    call.caller = None
                if request is None:
                    call.incomplete()
                elif isinstance(behavior, Direct):
                    behavior.begin(request, call)
                else:
                    pooled = self._pool.submit(
                        fn, in_pool, event, state, behavior, lambda: request, None, serializer
                    )
                    pooled.add_done_callback(call.ended)
            except BaseException:  # which would end the server's thread
                call.failed()
            return finished

        self._expected[call] = time.monotonic()
        self._looking.begin()
        with state.condition:
            event.call.start_server_batch((cygrpc.ReceiveMessageOperation(0),), begin)
            state.due.add(_RECEIVE)
        return call  # type: ignore[return-value]  # all that grpc does with it is done below

    def apart(self, work: Callable[[], None]) -> None:
        """Do ``work`` on a thread of its own."""
        super().submit(work)

    def _end_late(self) -> bool:
        too_old = time.monotonic() - _PATIENCE_S
        for call, since in self._expected.copy().items():
            if since > too_old:
                break  # they are in the order in which they came
            if self._expected.pop(call, None) is not None:
                call.abort(cygrpc.StatusCode.deadline_exceeded, "no request came")
        return bool(self._expected)


class _Call:
    """One unary call, and what grpc takes for the future of its answer; a real one costs as much."""

    __slots__ = ("_arrivals", "_context", "_event", "_has_ended", "_on_end", "_state", "caller")

    def __init__(self, event: Any, state: Any, arrivals: Arrivals) -> None:
        self._event = event
        self._state = state
        self._arrivals = arrivals
        self.caller: str | None = None
        self._context: grpc.ServicerContext | None = None
        self._on_end: Callable[[Any], object] | None = None
        self._has_ended = False

    def add_done_callback(self, on_end: Callable[[Any], object]) -> None:
        """``on_end`` is called when the call no longer counts towards the most that may be open. grpc says so
        before it looks for the request, and after a call was refused unread."""
        with self._state.condition:
            if not self._has_ended:
                self._on_end = on_end
                return
        on_end(self)

    @property
    def context(self) -> grpc.ServicerContext:
        if self._context is None:
            self._context = _server._Context(self._event, self._state, None)
        return self._context

    def answer(self, message: bytes) -> None:
        state = self._state
        with state.condition:
            # Before the client has its answer, who may ask again at once.
            self._arrivals.open.discard(self)
            if state.client is not _server._CANCELLED:
                operations = [
                    cygrpc.SendMessageOperation(message, 0),
                    cygrpc.SendStatusFromServerOperation(
                        state.trailing_metadata, cygrpc.StatusCode.ok, b"", 0
                    ),
                ]
                if state.initial_metadata_allowed:
                    operations.append(_server._get_initial_metadata_operation(state, None))
                sent = _server._send_status_from_server(state, _SEND)
                if len(message) > NOTED:
                    sent = self._arrivals.unsent.noted(self._event.call, len(message), sent)
                self._event.call.start_server_batch(operations, sent)
                state.statused = True
                state.due.add(_SEND)
            on_end = self._over()
        if on_end is not None:
            on_end(self)

    def go_on(self, work: Callable[[], None], size: int) -> None:
        if size > _LARGE:
            self._arrivals.apart(partial(self._do, work))
        else:
            work()

    def _do(self, work: Callable[[], None]) -> None:
        """``work``, whatever comes of it."""
        try:
            work()
        except BaseException:
            self.failed()

    def failed(self) -> None:
        """End after a fault of ours."""
        log.exception("a call could not be taken up")
        self.abort(cygrpc.StatusCode.internal, "internal error")

    def fail(self, error: HpsError) -> None:
        ending = ending_of(error)
        self.abort(ending.number, str(error), ending.trailers)

    def abort(self, code: Any, details: str, trailers: Trailers = None) -> None:
        """End with a status of grpc's, unless there is one already."""
        shown = details.encode()
        if len(shown) > _MOST_DETAILS:
            # Trailers have a largest size, each byte of these may take three; beyond it clients get another
            # error.
            shown = shown[:_MOST_DETAILS].decode(errors="ignore").encode()
        with self._state.condition:
            if not self._state.statused:
                self._state.trailing_metadata = trailers
                _server._abort(self._state, self._event.call, code, shown)
        self.ended()

    def incomplete(self) -> None:
        """There is no message: the client is gone, or closed its side without one."""
        with self._state.condition:
            gone = self._state.client is _server._CANCELLED
        if gone:
            self.ended()
        else:
            method = self._event.call_details.method
            self.abort(
                cygrpc.StatusCode.unimplemented, f"{method!r} requires exactly one request message."
            )

    def waits_for(self, future: Future[Any]) -> None:
        if not self.context.add_callback(future.cancel):
            future.cancel()

    def ended(self, _: Any = None) -> None:
        with self._state.condition:
            on_end = self._over()
        if on_end is not None:
            on_end(self)

    def _over(self) -> Callable[[Any], object] | None:
        """Whom to tell that it has ended, without the lock that is held here."""
        self._arrivals.open.discard(self)
        self._has_ended = True
        on_end, self._on_end = self._on_end, None
        return on_end
