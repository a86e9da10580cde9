"""The calls of a gRPC port: their limits, their callers, requests that do not arrive."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from hps.config.auth import Role
from services.frontend.grpc.http2.receive_budget import REQUEST_TIMEOUT_S
from services.frontend.grpc.http2.status_codes import DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED
from services.frontend.grpc.http2.unary_call import UnaryCall
from services.frontend.grpc.responders import CallContext
from services.frontend.grpc.slow_readers import SlowReaderLimit

# Threads that parse large requests.
_LARGE_THREADS = 32
SWEEP_S = 1.0
"""The period of `PortContext.sweep`."""
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
            RESOURCE_EXHAUSTED,
            f"{self._limit} calls are in flight, the maximum; retry later, or ask another replica",
        )
        return False


class CallTable:
    """The calls with one request on all connections of a port. Only for the event loop's thread.

    A call whose request does not arrive within ``REQUEST_TIMEOUT_S`` is ended. The message of a caller
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
        self._threads = ThreadPoolExecutor(_LARGE_THREADS, "grpc-large")
        self.slow_readers = SlowReaderLimit()

    def take(self, call: UnaryCall) -> None:
        """Check and count a new call, and expect its request."""
        handler = call.handler
        if not handler.is_auxiliary and not self.requests.enter(call):
            return
        if self._check_caller and handler.role:
            try:
                call.caller = self._check_caller(call, handler.role)
            except Exception as error:
                handler.reject(error, call)
                return
        if len(self._expected) >= self._max_expected:
            call.abort(
                RESOURCE_EXHAUSTED,
                f"{self._max_expected} calls without requests are open, the maximum; retry later",
            )
            return
        self._expected[call] = time.monotonic()

    def request_received(self, call: UnaryCall) -> bool:
        """Return True if ``call``, whose request was received, is still to be answered."""
        since = self._expected.pop(call, None)
        if since is None:
            return False
        if self._check_caller and time.monotonic() - since > _RECHECK_S:
            call.caller = None
        return not call.handler.is_auxiliary or self.auxiliary.enter(call)

    def forget(self, call: UnaryCall) -> bool:
        """Expect no request of ``call`` any more; return True if one was expected."""
        return self._expected.pop(call, None) is not None

    def release(self, call: UnaryCall) -> None:
        """Free the slot of ``call``."""
        (self.auxiliary if call.handler.is_auxiliary else self.requests).open.discard(call)

    def run_on_pool(self, work: Callable[[], None]) -> None:
        """Run ``work`` on a thread of the pool for large requests."""
        self._threads.submit(work)

    def shutdown(self) -> None:
        """Cancel work that has no thread yet."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def sweep(self, now: float) -> None:
        """End calls whose requests did not arrive in time."""
        while self._expected:
            call, since = next(iter(self._expected.items()))  # in order of arrival
            if since > now - REQUEST_TIMEOUT_S:
                return
            del self._expected[call]
            call.abort(DEADLINE_EXCEEDED, "no request was received in time")
