"""Byte budget of all admission queues."""

from __future__ import annotations

import threading

from services.frontend.errors import Overloaded


def raise_rejection(rejection: Overloaded | None) -> None:
    """Raise ``rejection``, if any."""
    try:
        if rejection is not None:
            raise rejection
    finally:
        del rejection  # break the reference cycle: the error's traceback refers to this frame


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
        raise_rejection(self.rejection(size, held_by_request))

    def rejection(self, size: int, held_by_request: int = 0) -> Overloaded | None:
        """The error that `require` would raise, or None."""
        if self.held > held_by_request and self.held + size > self.limit:
            return Overloaded(
                f"queued requests hold {self.held} bytes (server.admission.queue_bytes)",
                "queue_bytes",
            )
        return None

    def add(self, size: int) -> None:
        """Add ``size`` bytes; a negative size releases them."""
        with self._lock:
            self.held += size


class ByteReservation:
    """The bytes of one request; as a context, released at its end."""

    def __init__(self, budget: ByteBudget, held: int = 0) -> None:
        """``held``: bytes that are counted in ``budget`` already."""
        self._budget = budget
        self._own = held

    def grow(self, size: int) -> None:
        """Reserve ``size`` bytes more. Raises ``Overloaded`` if they do not fit."""
        self._budget.require(size, self._own)
        self._budget.add(size)
        self._own += size

    def release(self) -> None:
        """Release all bytes; further calls have no effect."""
        self._budget.add(-self._own)
        self._own = 0

    def __enter__(self) -> ByteReservation:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
