"""What the requests of all lines share: bytes to be held, and a thread that ends what waits too long."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Protocol
from weakref import ReferenceType, ref

from services.frontend.errors import Overloaded
from services.frontend.logs import log
from services.frontend.periodic_sweeper import PeriodicSweeper

# Between two looks at what waits, at least.
_LEAST_S = 0.001


class ByteBudget:
    """Bytes of requests that wait or whose bodies are coming, bounded. Any thread may call it."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.held = 0
        self._lock = threading.Lock()

    def require(self, size: int, own: int = 0) -> None:
        """Raises ``Overloaded`` unless ``size`` more bytes may be held; ``own`` of what is held are the
        request's already. A request larger than all there is may come alone."""
        refusal = self.refusal(size, own)
        try:
            if refusal is not None:
                raise refusal
        finally:
            del refusal  # it knows this frame, and those that hold the request

    def refusal(self, size: int, own: int = 0) -> Overloaded | None:
        """What `require` raises, if it does."""
        if self.held > own and self.held + size > self.most:
            return Overloaded(
                f"overloaded: waiting requests hold {self.held} bytes (server.admission.queue_bytes); "
                "retry later, or ask another replica",
                "queue_bytes",
            )
        return None

    def add(self, size: int) -> None:
        """Hold ``size`` bytes more, or fewer if negative."""
        with self._lock:
            self.held += size


class ByteReservation:
    """The bytes of one request, held while it is entered."""

    def __init__(self, room: ByteBudget) -> None:
        self._room = room
        self._own = 0

    def grow(self, size: int) -> None:
        """Hold ``size`` bytes more. Raises ``Overloaded`` when there is no room for them."""
        self._room.require(size, self._own)
        self._room.add(size)
        self._own += size

    def __enter__(self) -> ByteReservation:
        return self

    def __exit__(self, *_: object) -> None:
        self._room.add(-self._own)
        self._own = 0


class ExpiringItem(Protocol):
    """Something that waits. ``since``: from when on, by ``time.monotonic``."""

    since: float

    @property
    def has_ended(self) -> bool: ...

    def expire(self) -> None:
        """It has waited for as long as it may."""
        ...


class QueueTimeout:
    """Ends what has waited for ``after_s``. What ends sooner is not kept until then: whoever has it wait
    holds it, and what it holds. Any thread may call it."""

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._line: deque[ReferenceType[ExpiringItem]] = deque()
        # What is added while it sleeps is not due before it wakes: nobody has to wake it.
        self._looking = PeriodicSweeper(self._end_late, self._next_s, "hps-expiry")

    def add(self, waiting: ExpiringItem) -> None:
        """``waiting`` has just begun to wait."""
        self._line.append(ref(waiting))
        self._looking.begin()

    def _next_s(self) -> float:
        """Until the first is due."""
        if not self._line:
            return self._after_s
        found = self._line[0]()
        left_s = 0.0 if found is None else found.since + self._after_s - time.monotonic()
        return max(_LEAST_S, left_s)

    def _end_late(self) -> bool:
        # A thread that ends may look once more while another does already: each has what it takes.
        while self._line:
            try:
                first = self._line.popleft()
            except IndexError:
                break
            found = first()
            if found is None or found.has_ended:
                continue
            if found.since + self._after_s > time.monotonic():
                self._line.appendleft(first)
                return True
            _expire(found)
        return False


def _expire(late: ExpiringItem) -> None:
    try:
        late.expire()
    except Exception:  # the others still have to be ended
        log.exception("a request that waited too long could not be refused")
