"""What the requests of all lines share: bytes to be held, and a thread that ends what waits too long."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol
from weakref import ReferenceType, ref

from services.frontend.logs import log

# A thread that nothing needs for so long ends.
_IDLE_S = 10.0


class Room:
    """Bytes of requests that wait or whose bodies are coming, bounded. Any thread may call it."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.held = 0
        self._lock = threading.Lock()

    def fits(self, size: int) -> bool:
        """Whether ``size`` more bytes may be held. A request larger than all there is may come alone."""
        return not self.held or self.held + size <= self.most

    def add(self, size: int) -> None:
        """Hold ``size`` bytes more, or fewer if negative."""
        with self._lock:
            self.held += size

    @contextmanager
    def holding(self, size: int) -> Iterator[None]:
        self.add(size)
        try:
            yield
        finally:
            self.add(-size)


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
