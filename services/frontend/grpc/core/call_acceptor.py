"""Calls with one request taken from grpc, each answered on the thread that received its request if possible.

grpc's threaded server hands each call to a thread, which then waits until the server's own thread has
received the request: a client that sends none keeps a thread, and every answer costs the interpreter's lock
three changes of hands (26 keys: 390 µs of CPU, 200 without them). What it does for a call besides, and does
not need where the answer is there at once, is another sixth.

So methods are asked of grpc's core for `CallAcceptor`, and grpc's server passes on what the core tells
of their calls. That is not grpc's public interface: `probe.py` tries it. Where it does not work, calls run on
threads (`services/frontend/grpc/thread_calls.py`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from grpc import _server
from grpc._cython import cygrpc

from hps.config.auth import Role
from hps.periodic import SWEEP_IDLE_ROUNDS, PeriodicThread
from services.frontend.grpc.core.unary_call import NOTHING, Told, UnaryCall
from services.frontend.grpc.method_handlers import UnaryHandler
from services.frontend.grpc.responders import CallContext
from services.frontend.grpc.slow_readers import SlowReaderLimit

log = logging.getLogger(__name__)

# Threads for large requests.
_LARGE_AT_ONCE = 32
# How long a request may take to come; looked at so often.
_PATIENCE_S, _LOOK_S = 60.0, 1.0
# Who calls is looked at again when the request came so long after its call: a key may be no longer good.
_KNOWN_S = 1.0

May = Callable[[CallContext, Role], str]
"""Who calls; raises ``Unauthenticated`` or ``Forbidden`` when they may not do what needs a role."""


class _CallLimit:
    """Calls that are under way, bounded."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.open: set[UnaryCall] = set()

    def enter(self, call: UnaryCall) -> bool:
        """Whether there was room; if not, it is told so."""
        if len(self.open) < self._most:
            self.open.add(call)
            return True
        call.abort(
            cygrpc.StatusCode.resource_exhausted,
            f"{self._most} calls are under way, which is all that is taken; retry later, or ask another "
            "replica",
        )
        return False


class CallAcceptor:
    """Takes the calls of a server's methods that have one request. Calls whose request does not come for
    ``_PATIENCE_S`` are ended; those of callers who may not make them are not received at all: a message can
    be large."""

    def __init__(self, most: int, beside: int, may: May | None = None) -> None:
        """``most`` calls are taken at a time, and ``beside`` of the methods that are
        ``UnaryHandler.beside`` them, once their requests are there. ``may`` says who may call; None:
        everybody."""
        self._may = may
        self.requests, self.beside = _CallLimit(most), _CallLimit(beside)
        self._most_expected = most + beside
        self._expected: dict[UnaryCall, float] = {}  # calls without a request, and since when
        self._looking = PeriodicThread(
            self._end_late, _LOOK_S, "grpc-expected", idle_rounds=SWEEP_IDLE_ROUNDS
        )
        self._threads = ThreadPoolExecutor(_LARGE_AT_ONCE, "grpc-large")
        self.unsent = SlowReaderLimit()

    def start(self, server: grpc.Server, methods: Mapping[str, UnaryHandler]) -> None:
        """Start ``server``, which knows of ``methods``, here by their full names."""
        state = server._state
        for name in methods:
            del state.registered_method_handlers[name]
        server.start()
        with state.lock:
            for name, behavior in methods.items():
                _AcceptedMethod(name, behavior, state, self).ask()

    def take(self, call: UnaryCall) -> None:
        """``call`` has come."""
        behavior = call.behavior
        if not behavior.beside and not self.requests.enter(call):
            return
        if self._may and behavior.role:
            try:
                call.caller = self._may(call, behavior.role)
            except Exception as error:
                behavior.reject(error, call)
                return
        if len(self._expected) >= self._most_expected:
            call.abort(
                cygrpc.StatusCode.resource_exhausted,
                f"{self._most_expected} calls wait for their requests; retry later",
            )
            return
        self._expected[call] = time.monotonic()
        self._looking.start()
        call.receive()

    def has_come(self, call: UnaryCall) -> bool:
        """Whether ``call``, whose request has come, is still to be answered."""
        since = self._expected.pop(call, None)
        if since is None:
            return False
        if self._may and time.monotonic() - since > _KNOWN_S:
            call.caller = None
        return not call.behavior.beside or self.beside.enter(call)

    def left(self, call: UnaryCall) -> None:
        """``call`` is no longer one of those that are taken."""
        (self.beside if call.behavior.beside else self.requests).open.discard(call)

    def apart(self, work: Callable[[], None]) -> None:
        """Do ``work`` on a thread of its own."""
        self._threads.submit(work)

    def shutdown(self) -> None:
        """Nothing more is done apart."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _end_late(self) -> bool:
        too_old = time.monotonic() - _PATIENCE_S
        for call, since in self._expected.copy().items():
            if since > too_old:
                break  # they are in the order in which they came
            if self._expected.pop(call, None) is not None:
                call.abort(cygrpc.StatusCode.deadline_exceeded, "no request came")
        return bool(self._expected)


class _AcceptedMethod:
    """Has grpc's core tell of the calls of one method, one after another. What it tells, grpc's server passes
    on by calling this."""

    def __init__(
        self, name: str, behavior: UnaryHandler, state: Any, arrivals: CallAcceptor
    ) -> None:
        """``state``: of grpc's server."""
        self._name, self._behavior, self._state, self._arrivals = name, behavior, state, arrivals

    def ask(self) -> None:
        """For the next call. With the state's lock."""
        queue = self._state.completion_queue
        self._state.server.request_registered_call(queue, queue, self._name, self)
        self._state.due.add(self)

    def __call__(self, event: Any) -> Told:
        state = self._state
        try:
            with state.lock:
                state.due.remove(self)
                if state.stage is _server._ServerStage.STARTED:
                    self.ask()
            if event.success:
                call = UnaryCall(event, self._behavior, self._arrivals)
                state.rpc_states.add(call)  # which the server waits for
                try:
                    self._arrivals.take(call)
                except BaseException:
                    call.failed()
                return NOTHING
        except BaseException:  # which would end the server's thread
            log.exception("a call could not be taken")
        # The server may have ended by this: it looks when something is over.
        state.rpc_states.add(self)
        return self, ()
