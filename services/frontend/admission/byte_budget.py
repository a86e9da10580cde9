"""Byte budget of all admission queues, and the timeout of queued requests."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Protocol
from weakref import ReferenceType, ref

from hps.periodic import SWEEP_IDLE_ROUNDS, PeriodicThread
from services.frontend.errors import Overloaded
from services.frontend.logs import log

# Shortest interval between sweeps.
_LEAST_S = 0.001


class ByteBudget:
    """Bounded total size of queued requests and of those being received. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self._lock = threading.Lock()

    def require(self, size: int, held_by_request: int = 0) -> None:
        """Raise ``Overloaded`` unless ``size`` more bytes fit.

        The request already holds ``held_by_request`` bytes. One that is larger than the whole budget is
        admitted if no other holds any."""
        rejection = self.rejection(size, held_by_request)
        try:
            if rejection is not None:
                raise rejection
        finally:
            del rejection  # break the reference cycle: the error's traceback refers to this frame

    def rejection(self, size: int, held_by_request: int = 0) -> Overloaded | None:
        """The error that `require` would raise, or None."""
        if self.held > held_by_request and self.held + size > self.limit:
            return Overloaded(
                f"overloaded: queued requests hold {self.held} bytes (server.admission.queue_bytes); "
                "retry later, or ask another replica",
                "queue_bytes",
            )
        return None

    def add(self, size: int) -> None:
        """Add ``size`` bytes; a negative size releases them."""
        with self._lock:
            self.held += size


class ByteReservation:
    """The bytes of one request, released at the end of the context."""

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self._own = 0

    def grow(self, size: int) -> None:
        """Reserve ``size`` bytes more. Raises ``Overloaded`` if they do not fit."""
        self._budget.require(size, self._own)
        self._budget.add(size)
        self._own += size

    def __enter__(self) -> ByteReservation:
        return self

    def __exit__(self, *_: object) -> None:
        self._budget.add(-self._own)
        self._own = 0


class ExpiringItem(Protocol):
    """An item that times out; its wait began at ``since``, by ``time.monotonic``."""

    since: float

    @property
    def has_ended(self) -> bool: ...

    def expire(self) -> None:
        """Fail the item: its wait has timed out."""
        ...


class QueueTimeout:
    """Expires items that have waited for ``after_s``. Thread-safe.

    Items are held weakly: an item that ends earlier is freed with its owner, and so is what it refers to."""

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._items: deque[ReferenceType[ExpiringItem]] = deque()
        # An item that is added while the thread sleeps is not due before it wakes, so `add` does not wake
        # it.
        self._sweeper = PeriodicThread(
            self._expire_due, self._next_s, "hps-expiry", idle_rounds=SWEEP_IDLE_ROUNDS
        )

    def add(self, item: ExpiringItem) -> None:
        """Start the timeout of ``item``."""
        self._items.append(ref(item))
        self._sweeper.start()

    def _next_s(self) -> float:
        """Seconds until the first item is due."""
        if not self._items:
            return self._after_s
        found = self._items[0]()
        left_s = 0.0 if found is None else found.since + self._after_s - time.monotonic()
        return max(_LEAST_S, left_s)

    def _expire_due(self) -> bool:
        # While one thread ends, two may sweep at the same time: each has the items that it took.
        while self._items:
            try:
                first = self._items.popleft()
            except IndexError:
                break
            found = first()
            if found is None or found.has_ended:
                continue
            if found.since + self._after_s > time.monotonic():
                self._items.appendleft(first)
                return True
            _expire(found)
        return False


def _expire(late: ExpiringItem) -> None:
    try:
        late.expire()
    except Exception:  # the other items must still expire
        log.exception("failed to reject a request that waited too long")
