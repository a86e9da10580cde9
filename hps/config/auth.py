"""API keys: identify callers and check their roles. Keys are compared as digests and never logged."""

from __future__ import annotations

import hmac
import logging
import os
import stat
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from hps.config.checks import Path as KeyPath
from hps.config.checks import duplicates, is_loopback
from hps.config.config_errors import ConfigProblem, InvalidConfiguration, validate
from hps.config.model_file import place
from hps.config.model_schema import StrictModel
from hps.config.reload_log import ReloadLog
from hps.config.schema import Settings
from hps.config.server_settings import ApiKey, AuthSettings
from hps.config.yaml_text import read_yaml
from hps.errors import ConfigError, Forbidden, Unauthenticated

log = logging.getLogger(__name__)

Role = Literal["read", "write", "admin"]
_RANK: dict[str, int] = {"read": 1, "write": 2, "admin": 3}
# Shortest interval between checks of the key file for changes.
CHECK_EVERY_S = 1.0


@dataclass(frozen=True)
class Identity:
    """An identified caller."""

    name: str
    role: Role
    known_by: str = "API key"


class ApiKeys(ABC):
    """Identifies callers. Thread-safe; a call takes microseconds."""

    enabled = True
    """False if every caller may do everything."""

    @abstractmethod
    def authenticate(self, key: str | None) -> Identity:
        """Return the owner of ``key``. Raises Unauthenticated if it is missing or unknown."""

    @abstractmethod
    def certified(self, names: Collection[str]) -> Identity | None:
        """Return the caller whose certificate has one of ``names``; of several, the highest role.

        None if there is none."""

    def allows(self, role: str, needed: Role) -> bool:
        """True if ``role`` includes ``needed`` (read < write < admin)."""
        return _RANK.get(role, 0) >= _RANK[needed]

    def require(self, identity: Identity, needed: Role) -> None:
        """Raise Forbidden, naming both roles, unless the role of ``identity`` includes ``needed``."""
        if not self.allows(identity.role, needed):
            raise Forbidden(
                f"{identity.known_by} {identity.name!r} has role {identity.role}; this needs role {needed}"
            )


class NoApiKeys(ApiKeys):
    """``auth.mode: off``: every caller is an administrator."""

    enabled = False
    _anonymous = Identity("anonymous", "admin")

    def authenticate(self, key: str | None) -> Identity:
        return self._anonymous

    def certified(self, names: Collection[str]) -> Identity | None:
        return self._anonymous


class ApiKeyRing(ApiKeys):
    """The keys of the settings and of ``keys_file``, which is read again when it changes.

    If a change cannot be read, the former keys stay in force and the error is logged once. Each check then
    tries again, since the cause may disappear without a change of the file."""

    def __init__(self, keys: Sequence[ApiKey], file: Path | None) -> None:
        """Read the keys. Raises ConfigError if the file is missing or invalid, or two keys are equal."""
        self._fixed = tuple(keys)
        self._file = file
        self._lock = threading.Lock()
        self._next_check = time.monotonic() + CHECK_EVERY_S
        self._stamp = _stamp(file) if file else None
        self._log = ReloadLog("failed to reload API keys, keeping the former ones")
        self._owners, self._certificates = self._read()

    def certified(self, names: Collection[str]) -> Identity | None:
        self._check_file_if_due()
        known = self._certificates
        matching = [known[name] for name in names if name in known]
        return max(matching, key=lambda identity: _RANK[identity.role], default=None)

    def authenticate(self, key: str | None) -> Identity:
        if not key:
            raise Unauthenticated("missing API key")
        self._check_file_if_due()
        digest = sha256(key.encode("utf-8", "surrogateescape")).digest()
        owner: Identity | None = None
        # Compare all of them, so that the time taken reveals nothing about the keys.
        for known, identity in self._owners:
            if hmac.compare_digest(known, digest):
                owner = identity
        if owner is None:
            raise Unauthenticated("unknown API key")
        return owner

    def _read(self) -> tuple[list[tuple[bytes, Identity]], dict[str, Identity]]:
        """Read all keys: owners by the key's digest, and by certificate name."""
        keys = [*self._fixed, *(read_keys_file(self._file) if self._file else ())]
        source = str(self._file) if self._file else ""
        for finding in duplicates([k.name for k in keys], "keys", "API keys"):
            raise InvalidConfiguration([ConfigProblem(source, (), finding.message)])
        owners: dict[bytes, Identity] = {}
        certificates: dict[str, Identity] = {}
        for key in keys:
            if key.certificate is not None:
                if key.certificate in certificates:
                    other = certificates[key.certificate].name
                    message = f"callers {other!r} and {key.name!r} have the same certificate"
                    raise InvalidConfiguration([ConfigProblem(source, (), message)])
                certificates[key.certificate] = Identity(key.name, key.role, "certificate of")
                continue
            assert key.key is not None
            digest = sha256(key.key.encode()).digest()
            if digest in owners:
                message = f"API keys {owners[digest].name!r} and {key.name!r} have the same key"
                raise InvalidConfiguration([ConfigProblem(source, (), message)])
            owners[digest] = Identity(key.name, key.role)
        if not owners and not certificates:
            raise InvalidConfiguration([ConfigProblem(source, (), "holds no API key")])
        return list(owners.items()), certificates

    def _check_file_if_due(self) -> None:
        if self._file is not None and time.monotonic() >= self._next_check:
            self._check_file()

    def _check_file(self) -> None:
        """Read the file again if it has changed. One thread reads; the others do not wait."""
        if self._file is None or not self._lock.acquire(blocking=False):
            return
        try:
            self._next_check = time.monotonic() + CHECK_EVERY_S
            stamp = _stamp(self._file)
            if stamp == self._stamp:
                return
            self._owners, self._certificates = self._read()
            self._stamp = stamp
            self._log.succeeded()
            known = len(self._owners) + len(self._certificates)
            log.info("%s: reloaded, %d API keys in force", self._file, known)
        except ConfigError as error:
            self._stamp = None
            self._log.failed(error)
        finally:
            self._lock.release()


class _ApiKeysFile(StrictModel):
    keys: list[ApiKey]


def read_keys_file(path: Path) -> list[ApiKey]:
    """Read a YAML list of ``{name, role, key}``; its ConfigErrors never quote a secret."""
    document = read_yaml(path, "API key file")
    if not isinstance(document.data, list):
        message = "expected a list of mappings with name, role, key"
        raise InvalidConfiguration([ConfigProblem(str(path), (), message)])

    def where(key: KeyPath) -> str:
        return place(str(path), document.lines, key[1:])

    return validate(_ApiKeysFile, {"keys": document.data}, where, document.faults).keys


def load_api_keys(settings: AuthSettings) -> ApiKeys:
    """Build the callers of the server from ``auth``; without ``auth.mode``, it is ``off``.

    Raises ConfigError if the key file is missing or invalid. Logs the ``key_file_warnings``."""
    if settings.mode != "api_key":
        return NoApiKeys()
    for warning in key_file_warnings(settings):
        log.warning("%s", warning)
    return ApiKeyRing(settings.keys, settings.keys_file)


def key_file_warnings(settings: AuthSettings) -> list[str]:
    """Warn if other users of the machine can read the key file."""
    path = settings.keys_file
    if path is None or settings.mode != "api_key":
        return []
    try:
        mode = path.stat().st_mode
    except OSError:
        return []  # reading the file reports the error
    if mode & stat.S_IROTH:
        return [f"{path}: every user of this machine can read the API keys; try: chmod o-r {path}"]
    return []


def check_exposure(settings: Settings) -> None:
    """Raise ConfigError if a port listens beyond loopback and ``auth.mode`` is not set."""
    if settings.auth.mode is not None:
        return
    exposed = [
        ConfigProblem("", ("server", *name.split("."), "host"), _exposed(at.host))
        for name, at in settings.server.listeners().items()
        if not is_loopback(at.host)
    ]
    if exposed:
        raise InvalidConfiguration(exposed)


def _exposed(host: str) -> str:
    return (
        f"{host} is reachable from other machines, so auth.mode must be set: api_key, or off "
        "to allow all callers"
    )


def _stamp(path: Path) -> Any:
    """State of a file; differs after a change, also after a change of a link's target (mounted secrets)."""
    try:
        status = os.stat(path)
    except OSError as error:
        return error.errno
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino
