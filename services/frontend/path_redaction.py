"""Replace the server's paths in messages for clients by the names of their settings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from hps.config import Settings
from hps.config.repository_uri import RepositoryUri
from hps.errors import BadRequest, HpsError, NotFound, Unsupported

_names: dict[str, str] = {}
_pattern = re.compile(r"(?!)")
# Errors without paths, whose messages contain names that clients chose: do not search those.
_ECHOES = (BadRequest, NotFound, Unsupported)


def hide_paths(settings: Settings) -> None:
    """Make `without_paths` replace the files and folders in ``settings``."""
    global _pattern  # one per process, as are its settings
    for setting, path in settings_paths(settings):
        # not the root, nor folders that all systems have
        if path.is_absolute() and len(path.parts) > 1 and path.parts[1] != "dev":
            _names[str(path.absolute())] = setting
    if isinstance(settings.models.repository, RepositoryUri):
        _names[settings.models.repository] = "models.repository"
    longest_first = sorted(_names, key=len, reverse=True)
    _pattern = re.compile(rf"(?<![\w/.-])(?:{'|'.join(map(re.escape, longest_first))})(?![\w-])")


def without_paths(message: str) -> str:
    """``message`` with names of settings instead of their paths."""
    return _pattern.sub(lambda found: _names[found[0]], message)


def redact_error(error: HpsError) -> HpsError:
    """``error`` with a redacted message."""
    message = str(error)
    if isinstance(error, _ECHOES) or (shown := without_paths(message)) == message:
        return error
    other = type(error).__new__(type(error))
    other.__dict__.update(error.__dict__)
    other.args = (shown,)
    return other


def settings_paths(settings: BaseModel, within: str = "") -> Iterator[tuple[str, Path]]:
    """The names of all settings that are paths, and their values."""
    for name, value in settings:
        if isinstance(value, BaseModel):
            yield from settings_paths(value, f"{within}{name}.")
        elif isinstance(value, Path):
            yield f"{within}{name}", value
