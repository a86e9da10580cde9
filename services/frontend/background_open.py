"""Open a node while the server already answers, with progress and cancellation."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeVar

from hps.errors import HpsError, Unavailable
from hps.types import Progress


class _Closeable(Protocol):
    def close(self) -> None: ...


Closes = TypeVar("Closes", bound=_Closeable)


class LoadProgress:
    """Passes progress on to ``shown``, and keeps the open tasks in ``tasks`` for other threads to read.

    After ``cancel`` the next step raises ``Unavailable``: loading can be interrupted between two steps
    without harm, because a table counts as loaded only when it is complete."""

    def __init__(self, tasks: list[dict[str, Any]], shown: Progress) -> None:
        self._tasks = tasks
        self._shown = shown
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        self._cancelled.set()

    @contextmanager
    def task(self, title: str, total: int, unit: str = "rows") -> Iterator[Callable[[int], None]]:
        """See ``hps.types.Progress``."""
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
            raise Unavailable("loading was cancelled: the server is shutting down")


async def open_in_background(
    open_node: Callable[[], Closes], stopping: asyncio.Event, close_timeout_s: float
) -> Closes | None:
    """Open the node on a daemon thread, which does not keep the process alive if it is stuck.

    Returns None once ``stopping`` is set; a node that still opens within ``close_timeout_s`` is closed.
    Raises the errors of ``open_node``."""
    loop = asyncio.get_running_loop()
    opened: asyncio.Future[Closes] = loop.create_future()

    def work() -> None:
        try:
            node = open_node()
        except BaseException as error:
            _hand_over(loop, opened.set_exception, error)
        else:
            if not _hand_over(loop, opened.set_result, node):
                node.close()

    threading.Thread(target=work, name="hps-load", daemon=True).start()
    stop = asyncio.create_task(stopping.wait())
    either: list[asyncio.Future[Any]] = [opened, stop]
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if not stopping.is_set():
        return await opened
    with suppress(TimeoutError, HpsError):
        node = await asyncio.wait_for(opened, close_timeout_s)
        await asyncio.to_thread(node.close)
    return None


def _hand_over(loop: asyncio.AbstractEventLoop, settle: Callable[[Any], None], value: Any) -> bool:
    """Complete a future of ``loop`` from another thread; False if the loop has ended."""

    def complete() -> None:
        with suppress(asyncio.InvalidStateError):  # the waiter was cancelled
            settle(value)

    try:
        loop.call_soon_threadsafe(complete)
    except RuntimeError:
        return False
    return True
