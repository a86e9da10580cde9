"""Secrets in separate files, as Kubernetes and Docker mount them. They are never quoted."""

from __future__ import annotations

import re
from pathlib import Path

from hps.config.reload_log import ReloadLog
from hps.config.server_settings import KEY_PATTERN
from hps.errors import ConfigError


def read_secret(path: Path, setting: str, *, api_key: bool = False) -> str:
    """Read the secret in ``path``, without the line ending.

    Raises ConfigError with ``setting`` if it cannot be read, is not text, is empty, or is not a valid
    ``api_key`` if that is expected."""
    try:
        secret = path.read_text("utf-8").rstrip("\r\n")
    except OSError as error:
        remedy = "mount the secret there, or correct the path"
        raise ConfigError(f"{setting}: {path}: {error.strerror}; {remedy}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{setting}: {path} is not text; expected only the secret") from None
    if not secret:
        raise ConfigError(f"{setting}: {path} is empty; expected the secret")
    if api_key and not re.fullmatch(KEY_PATTERN, secret):
        raise ConfigError(
            f"{setting}: {path} does not contain an API key; expected 16 to 512 printable ASCII "
            "characters without spaces, and nothing else"
        )
    return secret


class Secret:
    """A secret in the settings, or in a file that may change while it is used. Thread-safe."""

    def __init__(
        self, value: str | None, path: Path | None, setting: str, *, api_key: bool = False
    ) -> None:
        """``setting`` is the name of ``path``'s setting. Raises ConfigError as `read_secret` does."""
        self._path, self._setting, self._api_key = path, setting, api_key
        self._value = value if path is None else read_secret(path, setting, api_key=api_key)
        self._log = ReloadLog("failed to reload the secret, keeping the former one")

    def now(self) -> str | None:
        """Read the secret; if the file cannot be read, return the former one and log that once."""
        if self._path is None:
            return self._value
        try:
            self._value = read_secret(self._path, self._setting, api_key=self._api_key)
            self._log.succeeded()
        except ConfigError as error:
            self._log.failed(error)
        return self._value
