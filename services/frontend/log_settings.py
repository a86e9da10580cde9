"""Read and change log settings at run time: Triton's extension ``logging``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hps.errors import BadRequest, Unsupported
from services.frontend.errors import short_value
from services.frontend.logs import LEVELS, Level, level, log, set_level
from services.server_state import ServerState

# Triton's switches and the level of each; the first one that is on decides.
_SWITCHES: dict[str, Level] = {"log_info": "info", "log_warning": "warning", "log_error": "error"}
_FIXED = {"log_file": "", "log_format": "ISO8601"}


def log_settings() -> dict[str, Any]:
    """The settings, by Triton's names. ``log_verbose_level`` above 0 is level debug."""
    held = LEVELS.index(level())
    switches = {name: held <= LEVELS.index(least) for name, least in _SWITCHES.items()}
    return {**_FIXED, **switches, "log_verbose_level": int(held == 0)}


def change_log_settings(changes: Mapping[str, Any], state: ServerState[Any]) -> dict[str, Any]:
    """Change the settings in ``changes`` in all of the server's processes; return the settings.

    Raises ``BadRequest`` or ``Unsupported``."""
    if state.propagate_log_level is None:
        raise Unsupported("this is one of several processes; use the admin port, which changes all")
    settings = log_settings()
    for name, value in changes.items():
        _check(name, value, settings)
        settings[name] = value
    new_level = _level(settings)
    if new_level != level():
        set_level(new_level)
        state.propagate_log_level(new_level)
        log.warning("changed the log level to %s", new_level)
    return log_settings()


def _check(name: str, value: Any, settings: Mapping[str, Any]) -> None:
    if name not in settings:
        raise BadRequest(
            f"unknown log setting {short_value(name)}; the settings are {', '.join(settings)}"
        )
    if name in _FIXED:
        if value != settings[name]:
            raise Unsupported(
                f"'{name}' cannot be changed: lines go to standard error in a fixed format"
            )
    elif name in _SWITCHES:
        if not isinstance(value, bool):
            raise BadRequest(f"'{name}' must be true or false, got {short_value(value)}")
    elif type(value) is not int or value < 0:
        raise BadRequest(f"'{name}' must be a number from 0 up, got {short_value(value)}")


def _level(settings: Mapping[str, Any]) -> Level:
    if settings["log_verbose_level"]:
        return "debug"
    for name, found in _SWITCHES.items():
        if settings[name]:
            return found
    raise BadRequest("errors are always logged: 'log_error' must stay true")
