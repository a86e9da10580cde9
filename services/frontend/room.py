"""What the requests of all lines share: bytes to be held, and a thread that ends what waits too long."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Protocol
from weakref import ReferenceType, ref

from services.frontend.errors import Overloaded
from services.frontend.logs import log

# A thread that nothing needs for so long ends.
_IDLE_S = 10.0


class Room:
    """Bytes of requests that wait or whose bodies are coming, bounded. Any thread may call it."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.held = 0
        self._lock = threading.Lock()

    def require(self, size: int, own: int = 0) -> None:
        """Raises ``Overloaded`` unless ``size`` more bytes may be held; ``own`` of what is held are the
        request's already. A request larger than all there is may come alone."""
        if (refusal := self.refusal(size, own)) is not None:
            raise refusal

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


class Share:
    """The bytes of one request, held while it is entered."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._own = 0

    def grow(self, size: int) -> None:
        """Hold ``size`` bytes more. Raises ``Overloaded`` when there is no room for them."""
        self._room.require(size, self._own)
        self._room.add(size)
        self._own += size

    def __enter__(self) -> Share:
        return self

    def __exit__(self, *_: object) -> None:
        self._room.add(-self._own)
        self._own = 0


class Expiring(Protocol):
    """Something that waits. ``since``: from when on, by ``time.monotonic``."""

    since: float

    @property
    def has_ended(self) -> bool: ...

    def expire(self) -> None:
        """It has waited for as long as it may."""
        ...


class Expiry:
    """Ends what has waited for ``after_s``, on a thread of its own while there is any. What ends sooner
    is not kept until then: whoever has it wait holds it, and what it holds."""

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._line: deque[tuple[float, ReferenceType[Expiring]]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, waiting: Expiring) -> None:
        """``waiting`` has just begun to wait."""
        with self._changed:
            self._line.append((waiting.since + self._after_s, ref(waiting)))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="hps-expiry", daemon=True)
                self._thread.start()
            elif len(self._line) == 1:
                self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._line and _has_ended(self._line[0][1]):
                    self._line.popleft()
                if not self._line:
                    if not self._changed.wait(_IDLE_S) and not self._line:
                        self._thread = None
                        return
                    continue
                due, late = self._line[0]
                left_s = due - time.monotonic()
                if left_s > 0:
                    self._changed.wait(left_s)
                    continue
                self._line.popleft()
            _expire(late)


def _has_ended(waiting: ReferenceType[Expiring]) -> bool:
    found = waiting()
    return found is None or found.has_ended


def _expire(late: ReferenceType[Expiring]) -> None:
    found = late()
    if found is None:
        return
    try:
        found.expire()
    except Exception:  # the others still have to be ended
        log.exception("a request that waited too long could not be refused")
