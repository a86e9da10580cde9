"""Accept unary calls from grpc's core; answer on the thread that received the request if possible.

grpc's threaded server hands each call to a thread, which then waits until the server's own thread has
received the request: a client that sends none keeps a thread, and every answer costs three handovers of the
interpreter's lock (26 keys: 390 µs of CPU, 200 without them). The other work that it does per call, and that
an immediate answer does not need, is another sixth.

So `CallAcceptor` requests the calls of methods from grpc's core, and grpc's server dispatches the core's
events to them. That is not grpc's public interface: `probe.py` tries it. Where it does not work, calls run on
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
from services.frontend.grpc.core.unary_call import NOTHING, EventResult, UnaryCall
from services.frontend.grpc.method_handlers import UnaryHandler
from services.frontend.grpc.responders import CallContext
from services.frontend.grpc.slow_readers import SlowReaderLimit

log = logging.getLogger(__name__)

# Threads that parse large requests.
_LARGE_THREADS = 32
# The time within which a call's request must arrive, and the period of the sweep.
_REQUEST_TIMEOUT_S, _SWEEP_S = 60.0, 1.0
# The caller is checked again if the request arrived this long after its call: the key may be revoked.
_RECHECK_S = 1.0

CheckCaller = Callable[[CallContext, Role], str]
"""Returns the caller's name; raises ``Unauthenticated`` or ``Forbidden`` if it does not have the role."""


class _CallLimit:
    """A bound on the calls in flight."""

    def __init__(self, most: int) -> None:
        self._limit = most
        self.open: set[UnaryCall] = set()

    def enter(self, call: UnaryCall) -> bool:
        """Take a slot for ``call``; without a free one, reject the call and return False."""
        if len(self.open) < self._limit:
            self.open.add(call)
            return True
        call.abort(
            cygrpc.StatusCode.resource_exhausted,
            f"{self._limit} calls are in flight, the maximum; retry later, or ask another replica",
        )
        return False


class CallAcceptor:
    """Accepts a server's unary calls.

    A call whose request does not arrive within ``_REQUEST_TIMEOUT_S`` is ended. The message of a caller
    without the role is not received at all, because a message can be large.
    """

    def __init__(self, most: int, auxiliary: int, check_caller: CheckCaller | None = None) -> None:
        """Bound the calls in flight: ``most`` requests, and ``auxiliary`` calls of methods with
        ``UnaryHandler.is_auxiliary``, which count from the arrival of their messages. ``check_caller`` checks
        the caller; None accepts all."""
        self._check_caller = check_caller
        self.requests, self.auxiliary = _CallLimit(most), _CallLimit(auxiliary)
        self._max_expected = most + auxiliary
        # Calls without a request, with the time of their arrival.
        self._expected: dict[UnaryCall, float] = {}
        self._sweeper = PeriodicThread(
            self._sweep, _SWEEP_S, "grpc-expected", idle_rounds=SWEEP_IDLE_ROUNDS
        )
        self._threads = ThreadPoolExecutor(_LARGE_THREADS, "grpc-large")
        self.slow_readers = SlowReaderLimit()

    def start(self, server: grpc.Server, methods: Mapping[str, UnaryHandler]) -> None:
        """Start ``server`` and accept its ``methods``, by full name; they must be registered with it."""
        state = server._state
        for name in methods:
            del state.registered_method_handlers[name]
        server.start()
        with state.lock:
            for name, behavior in methods.items():
                _AcceptedMethod(name, behavior, state, self).ask()

    def take(self, call: UnaryCall) -> None:
        """Check and count a new call, then receive its request."""
        behavior = call.behavior
        if not behavior.is_auxiliary and not self.requests.enter(call):
            return
        if self._check_caller and behavior.role:
            try:
                call.caller = self._check_caller(call, behavior.role)
            except Exception as error:
                behavior.reject(error, call)
                return
        if len(self._expected) >= self._max_expected:
            call.abort(
                cygrpc.StatusCode.resource_exhausted,
                f"{self._max_expected} calls without requests are open, the maximum; retry later",
            )
            return
        self._expected[call] = time.monotonic()
        self._sweeper.start()
        call.receive()

    def request_received(self, call: UnaryCall) -> bool:
        """Return True if ``call``, whose request was received, is still to be answered."""
        since = self._expected.pop(call, None)
        if since is None:
            return False
        if self._check_caller and time.monotonic() - since > _RECHECK_S:
            call.caller = None
        return not call.behavior.is_auxiliary or self.auxiliary.enter(call)

    def release(self, call: UnaryCall) -> None:
        """Free the slot of ``call``."""
        (self.auxiliary if call.behavior.is_auxiliary else self.requests).open.discard(call)

    def run_on_pool(self, work: Callable[[], None]) -> None:
        """Run ``work`` on a thread of the pool for large requests."""
        self._threads.submit(work)

    def shutdown(self) -> None:
        """Cancel work that has no thread yet."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _sweep(self) -> bool:
        too_old = time.monotonic() - _REQUEST_TIMEOUT_S
        for call, since in self._expected.copy().items():
            if since > too_old:
                break  # in order of arrival
            if self._expected.pop(call, None) is not None:
                call.abort(cygrpc.StatusCode.deadline_exceeded, "no request was received in time")
        return bool(self._expected)


class _AcceptedMethod:
    """Requests the calls of one method from grpc's core, one after another.

    grpc's server calls the object with each event of the core.
    """

    def __init__(
        self, name: str, behavior: UnaryHandler, state: Any, acceptor: CallAcceptor
    ) -> None:
        """``state`` is the state of grpc's server."""
        self._name, self._behavior, self._state, self._acceptor = name, behavior, state, acceptor

    def ask(self) -> None:
        """Request the next call. The caller holds the state's lock."""
        queue = self._state.completion_queue
        self._state.server.request_registered_call(queue, queue, self._name, self)
        self._state.due.add(self)

    def __call__(self, event: Any) -> EventResult:
        state = self._state
        try:
            with state.lock:
                state.due.remove(self)
                if state.stage is _server._ServerStage.STARTED:
                    self.ask()
            if event.success:
                call = UnaryCall(event, self._behavior, self._acceptor)
                state.rpc_states.add(call)  # the server waits for them when it stops
                try:
                    self._acceptor.take(call)
                except BaseException:
                    call.failed()
                return NOTHING
        except BaseException:  # it would end the server's thread
            log.exception("failed to accept a call")
        # This event may be the server's last: it checks whether it has ended whenever a call is over.
        state.rpc_states.add(self)
        return self, ()
