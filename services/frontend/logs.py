"""Log lines: one line each, ``time level logger message key=value …``, made to be grepped.

A traceback goes into the same line, with ``\n`` for its line ends, so that one event is one line.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

log = logging.getLogger("hps.frontend")

_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:/@+,")


def fields(**values: Any) -> str:
    """``key=value`` pairs in logfmt; empty ones are left out, what is not plain is quoted."""
    return " ".join(f"{key}={_quoted(value)}" for key, value in values.items() if value != "")


def _quoted(value: Any) -> str:
    text = str(value)
    if text and _PLAIN.issuperset(text):
        return text
    escaped = text.encode("unicode_escape").decode("ascii").replace('"', '\\"')
    return f'"{escaped}"'


class OneLine(logging.Formatter):
    """UTC time with milliseconds, level, logger, message; the traceback as a field, and ``always`` the same
    ones."""

    def __init__(self, always: str = "") -> None:
        super().__init__()
        self._always = always and f" {always}"

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        head = f"{seconds}.{int(record.msecs):03d}Z {record.levelname} {record.name}"
        line = f"{head} {_single(record.getMessage())}{self._always}"
        if record.exc_info:
            line += " " + fields(traceback=self.formatException(record.exc_info))
        return line


def _single(message: str) -> str:
    return message.replace("\\", "\\\\").replace("\n", "\\n") if "\n" in message else message


def setup(level: str, **always: Any) -> None:
    """Send the process's log lines to standard error from ``level`` upwards, each with the fields
    ``always``."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLine(fields(**always)))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # uvicorn warns of every malformed request; those are answered and are no news to an operator.
    logging.getLogger("uvicorn").setLevel("DEBUG" if level == "debug" else "ERROR")
    for chatty in ("asyncio", "concurrent.futures"):
        logging.getLogger(chatty).setLevel("WARNING")
