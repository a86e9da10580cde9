"""Secrets that stand in files of their own, as Kubernetes and Docker mount them. They are never quoted."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from hps.config.server_settings import KEY_PATTERN
from hps.errors import ConfigError

log = logging.getLogger(__name__)


def read_secret(path: Path, setting: str, *, api_key: bool = False) -> str:
    """What stands in ``path``, without the end of its line. ConfigError that names ``setting`` when it cannot
    be read, is no text or is empty, or is no ``api_key`` where one is expected."""
    try:
        secret = path.read_text("utf-8").rstrip("\r\n")
    except OSError as error:
        mend = "mount the secret there, or correct the path"
        raise ConfigError(f"{setting}: {path}: {error.strerror}; {mend}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{setting}: {path} is no text; expected the secret alone") from None
    if not secret:
        raise ConfigError(f"{setting}: {path} is empty; expected the secret alone")
    if api_key and not re.fullmatch(KEY_PATTERN, secret):
        raise ConfigError(
            f"{setting}: what stands in {path} is no API key; expected 16 to 512 printable ASCII characters "
            "without spaces, and nothing else"
        )
    return secret


class Secret:
    """A secret that is given, or stands in a file that may change while it is used. Any thread may ask."""

    def __init__(
        self, value: str | None, path: Path | None, setting: str, *, api_key: bool = False
    ) -> None:
        """``setting`` names ``path``. Raises ConfigError as `read_secret`."""
        self._path, self._setting, self._api_key = path, setting, api_key
        self._value = value if path is None else read_secret(path, setting, api_key=api_key)
        self._problem = ""

    def now(self) -> str | None:
        """What it is at the moment; what it was, as long as the file cannot be read, which is logged once."""
        if self._path is None:
            return self._value
        try:
            self._value = read_secret(self._path, self._setting, api_key=self._api_key)
            self._problem = ""
        except ConfigError as error:
            if str(error) != self._problem:
                self._problem = str(error)
                log.error("the former secret stays in use: %s", error)
        return self._value
