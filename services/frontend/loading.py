"""How far loading is: for ``/v1/status``, and a way to end it early."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from hps.errors import Unavailable
from hps.types import Progress


class LoadProgress:
    """Passes progress on to ``shown`` and keeps the open tasks in ``tasks``, for others to read.

    After ``cancel`` the next step raises ``Unavailable``: loading can be cut off between two steps
    without harm, because a table counts as loaded only when all of it is there.
    """

    def __init__(self, tasks: list[dict[str, Any]], shown: Progress) -> None:
        self._tasks = tasks
        self._shown = shown
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        self._cancelled.set()

    def task(
        self, title: str, total: int, unit: str = "rows"
    ) -> AbstractContextManager[Callable[[int], None]]:
        """See ``hps.types.Progress``."""
        return self._task(title, total, unit)

    @contextmanager
    def _task(self, title: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
        self._check()
        entry: dict[str, Any] = {"title": title, "done": 0, "total": total, "unit": unit}
        self._tasks.append(entry)
        try:
            with self._shown.task(title, total, unit) as show:

                def step(size: int) -> None:
                    self._check()
                    entry["done"] += size
                    show(size)

                yield step
        finally:
            self._tasks.remove(entry)

    def _check(self) -> None:
        if self._cancelled.is_set():
            raise Unavailable("loading was given up: the server is shutting down")
