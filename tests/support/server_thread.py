"""A server of the front end on an event loop of its own thread."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import Any


class Running:
    """A server on an event loop of its own thread."""

    def __init__(self, server: Any, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.server = server
        self._loop = loop or asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self.server.serve())

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self, *, force: bool = False) -> None:
        """Begin the end, if that has not come."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(lambda: self.server.stop(force=force))

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()
