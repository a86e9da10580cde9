"""Progress on stderr: bars on a terminal, else a line every few seconds; nothing for quick work."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, TextIO

from hps.tools.output import age, count, size

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class ConsoleProgress:
    """Shows ``hps.types.Progress`` on stderr. Tasks may overlap and be advanced from any thread.

    A task is shown once it has run for ``delay_s``, even if its first step takes that long."""

    def __init__(
        self, stream: TextIO | None = None, *, delay_s: float = 1.0, every_s: float = 5.0
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._delay_s = delay_s
        self._every_s = every_s
        self._lock = threading.Lock()
        self._bars: Progress | None = None
        self._shown = 0

    def task(
        self, title: str, total: int, unit: str = "rows"
    ) -> AbstractContextManager[Callable[[int], None]]:
        if self._stream.isatty():
            return self._bar(title, total, unit)
        return self._lines(title, total, unit)

    @contextmanager
    def _bar(self, title: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
        done = 0
        bar: TaskID | None = None
        finished = False

        def show() -> None:
            nonlocal bar
            with self._lock:
                if not finished:
                    text = _amount(done, total, unit)
                    bar = self._open().add_task(title, total=total, completed=done, amount=text)

        def advance(step: int) -> None:
            nonlocal done
            with self._lock:
                done += step
                if bar is not None and self._bars is not None:
                    text = _amount(done, total, unit)
                    self._bars.update(bar, completed=done, amount=text)

        timer = threading.Timer(self._delay_s, show)
        timer.daemon = True
        timer.start()
        try:
            yield advance
        finally:
            timer.cancel()
            with self._lock:
                finished = True
                if bar is not None:
                    self._close()

    def _open(self) -> Progress:
        """The one live display, shared by overlapping tasks (rich allows one at a time)."""
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TimeRemainingColumn
        from rich.progress import TextColumn as Text

        if self._bars is None:
            self._bars = Progress(
                Text("{task.description}"),
                BarColumn(),
                Text("{task.fields[amount]}"),
                TimeRemainingColumn(),
                console=Console(file=self._stream),
                transient=True,
            )
            self._bars.start()
        self._shown += 1
        return self._bars

    def _close(self) -> None:
        self._shown -= 1
        if self._shown == 0 and self._bars is not None:
            self._bars.stop()
            self._bars = None

    @contextmanager
    def _lines(self, title: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
        start = printed = time.monotonic()
        done = 0

        def advance(step: int) -> None:
            nonlocal done, printed
            with self._lock:
                done += step
                now = time.monotonic()
                if now - start < self._delay_s or now - printed < self._every_s:
                    return
                printed = now
                line = f"{title}: {_amount(done, total, unit)}"
            print(line, file=self._stream, flush=True)

        yield advance
        elapsed = time.monotonic() - start
        if elapsed >= self._delay_s:
            line = f"{title}: {_amount(done, total, unit)} in {age(elapsed)}"
            print(line, file=self._stream, flush=True)


def _amount(done: int, total: int, unit: str) -> str:
    if unit == "bytes":
        return f"{size(done)} of {size(total)}"
    return f"{count(done)} of {count(total)} {unit}"
