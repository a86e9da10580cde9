"""Progress that cancels a download when its process is closed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hps.errors import Unavailable


class CancelOn:
    """See `hps.types.Progress`; once ``event`` is set, each step raises Unavailable."""

    def __init__(self, event: threading.Event) -> None:
        self._event = event

    @contextmanager
    def task(self, title: str, total: int, unit: str = "rows") -> Iterator[Callable[[int], None]]:
        def step(size: int) -> None:
            if self._event.is_set():
                raise Unavailable(f"{title} was cancelled: the process is being closed")

        yield step
