"""Log lines about files that are read again while they are in use."""

from __future__ import annotations

import logging

from hps.errors import ConfigError

log = logging.getLogger(__name__)


class ReloadLog:
    """Logs ``message`` and the cause when a reload fails, but each cause once in a row.

    Any thread may call it; a race only repeats a line."""

    def __init__(self, message: str) -> None:
        self._message = message
        self._cause = ""

    def failed(self, error: ConfigError) -> None:
        if str(error) != self._cause:
            self._cause = str(error)
            log.error("%s: %s", self._message, error)

    def succeeded(self) -> None:
        self._cause = ""
