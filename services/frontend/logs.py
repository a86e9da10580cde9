"""Log lines, one per event: as text, ``time level logger message key=value …``, or as a JSON object.

A traceback is in the same line."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any, Literal, get_args

import orjson

from hps.config.server_settings import ServerSettings

log = logging.getLogger("hps.frontend")

_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:/@+,")

Level = Literal["debug", "info", "warning", "error"]
LEVELS: tuple[Level, ...] = get_args(Level)


class LogFields(dict[str, Any]):
    """Fields of an event; as text, in logfmt."""

    def __str__(self) -> str:
        return " ".join(f"{key}={_quoted(value)}" for key, value in self.items())


def fields(**values: Any) -> LogFields:
    """Build the last argument of a log message that ends in ``%s``; empty values are left out."""
    return LogFields({key: value for key, value in values.items() if value != ""})


def _quoted(value: Any) -> str:
    text = str(value)
    if text and _PLAIN.issuperset(text):
        return text
    escaped = text.encode("unicode_escape").decode("ascii").replace('"', '\\"')
    return f'"{escaped}"'


class TextLogFormatter(logging.Formatter):
    """UTC time with milliseconds, level, logger, message, fields.

    The fields are the event's, the traceback, and those of ``always``."""

    def __init__(self, always: LogFields | None = None) -> None:
        super().__init__()
        self._always = always or LogFields()

    def format(self, record: logging.LogRecord) -> str:
        more = LogFields(self._always)
        if record.exc_info:
            more["traceback"] = self.formatException(record.exc_info)
        return self._line(record, _time(record), more)

    def _line(self, record: logging.LogRecord, when: str, more: LogFields) -> str:
        message = _single(record.getMessage())
        return f"{when} {record.levelname} {record.name} {message}{more and ' '}{more or ''}"


class JsonLogFormatter(TextLogFormatter):
    """The same as a JSON object: ``ts``, ``level``, ``logger``, ``msg`` and the event's fields by name."""

    def _line(self, record: logging.LogRecord, when: str, more: LogFields) -> str:
        event_fields = record.args if isinstance(record.args, LogFields) else {}
        message = record.getMessage()
        if event_fields and isinstance(record.msg, str):
            message = record.msg.removesuffix("%s").rstrip()
        head = {"ts": when, "level": record.levelname.lower(), "logger": record.name}
        event = {**more, **event_fields, **head, "msg": message}
        ordered = {name: event[name] for name in (*head, "msg", *event_fields, *more)}
        return orjson.dumps(ordered, default=str).decode()


def _time(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"


def _single(message: str) -> str:
    """``message`` in one line, without terminal control characters."""
    if message.isprintable():
        return message
    return "".join(c if c.isprintable() else _escaped(c) for c in message.replace("\\", "\\\\"))


def _escaped(text: str) -> str:
    return text.encode("unicode_escape").decode("ascii")


def setup_logging(settings: ServerSettings, **always: Any) -> None:
    """Log to standard error as the settings say, with the fields ``always`` in each line."""
    formatter = JsonLogFormatter if settings.log_format == "json" else TextLogFormatter
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(fields(**always)))
    logging.getLogger().handlers[:] = [handler]
    for chatty in ("asyncio", "concurrent.futures"):
        logging.getLogger(chatty).setLevel("WARNING")
    set_level(settings.log_level)


def level() -> Level:
    """The current log level."""
    held = logging.getLogger().level
    return next((level for level in LEVELS if held <= logging.getLevelName(level.upper())), "error")


def set_level(level: Level) -> None:
    """Log from ``level`` upwards from now on."""
    logging.getLogger().setLevel(level.upper())
    # uvicorn warns of every malformed request; the client gets an answer, and an operator can do nothing.
    logging.getLogger("uvicorn").setLevel("DEBUG" if level == "debug" else "ERROR")
