"""API keys: who is asking, and may they. Keys are compared as digests and never logged."""

from __future__ import annotations

import hmac
import logging
import os
import stat
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, Protocol

from hps.config.checks import Path as KeyPath
from hps.config.checks import duplicates, is_loopback
from hps.config.config_errors import ConfigProblem, InvalidConfiguration, validate
from hps.config.model_file import place
from hps.config.model_schema import StrictModel
from hps.config.schema import Settings
from hps.config.server_settings import ApiKey, AuthSettings
from hps.config.yaml_text import read_yaml
from hps.errors import ConfigError, Forbidden, Unauthenticated

log = logging.getLogger(__name__)

Role = Literal["read", "write", "admin"]
_RANK: dict[str, int] = {"read": 1, "write": 2, "admin": 3}
# How often a request may cost a look at the key file.
LOOK_EVERY_S = 1.0


@dataclass(frozen=True)
class Identity:
    """A caller that was recognised."""

    name: str
    role: Role
    known_by: str = "API key"


class ApiKeys(Protocol):
    """Recognises callers. Safe to use from many threads; a call takes microseconds."""

    @property
    def enabled(self) -> bool:
        """False when everybody may do everything."""
        ...

    def authenticate(self, key: str | None) -> Identity:
        """The owner of ``key``; Unauthenticated when there is none or nobody owns it."""
        ...

    def certified(self, names: Collection[str]) -> Identity | None:
        """The caller whose certificate has one of ``names``: of several, the one that may do most; None when
        nobody has."""
        ...

    def allows(self, role: str, needed: Role) -> bool:
        """Whether a caller of ``role`` may do what needs ``needed`` (read < write < admin)."""
        ...

    def require(self, identity: Identity, needed: Role) -> None:
        """Forbidden, naming both roles, unless ``identity`` may do what needs ``needed``."""
        ...


class _Roles:
    def allows(self, role: str, needed: Role) -> bool:
        return _RANK.get(role, 0) >= _RANK[needed]

    def require(self, identity: Identity, needed: Role) -> None:
        if not self.allows(identity.role, needed):
            raise Forbidden(
                f"{identity.known_by} {identity.name!r} has role {identity.role}; this needs role {needed}"
            )


class NoApiKeys(_Roles):
    """``auth.mode: off``: everybody is an administrator."""

    enabled = False
    _anybody = Identity("anonymous", "admin")

    def authenticate(self, key: str | None) -> Identity:
        return self._anybody

    def certified(self, names: Collection[str]) -> Identity | None:
        return self._anybody


class ApiKeyRing(_Roles):
    """The keys of the settings and of ``keys_file``, which is read again when it changes.

    A change that cannot be read keeps the former keys in force and is logged once; it is tried again at
    every look, for what was in the way may go without a change of the file.
    """

    enabled = True

    def __init__(self, keys: Sequence[ApiKey], file: Path | None) -> None:
        """ConfigError when the file is missing or wrong, or two keys are the same."""
        self._fixed = tuple(keys)
        self._file = file
        self._lock = threading.Lock()
        self._next_look = time.monotonic() + LOOK_EVERY_S
        self._stamp = _stamp(file) if file else None
        self._problem = ""
        self._owners, self._certificates = self._read()

    def certified(self, names: Collection[str]) -> Identity | None:
        self._look_in_time()
        known = self._certificates
        found = [known[name] for name in names if name in known]
        return max(found, key=lambda identity: _RANK[identity.role], default=None)

    def authenticate(self, key: str | None) -> Identity:
        if not key:
            raise Unauthenticated("an API key is needed; none was given")
        self._look_in_time()
        digest = sha256(key.encode("utf-8", "surrogateescape")).digest()
        found: Identity | None = None
        # All of them, found or not: the time taken says nothing about the keys.
        for known, identity in self._owners:
            if hmac.compare_digest(known, digest):
                found = identity
        if found is None:
            raise Unauthenticated("unknown API key")
        return found

    def _read(self) -> tuple[list[tuple[bytes, Identity]], dict[str, Identity]]:
        """The owners of keys, by digest, and of certificates, by what those name."""
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
                message = f"API keys {owners[digest].name!r} and {key.name!r} are the same secret"
                raise InvalidConfiguration([ConfigProblem(source, (), message)])
            owners[digest] = Identity(key.name, key.role)
        if not owners and not certificates:
            raise InvalidConfiguration([ConfigProblem(source, (), "holds no API key")])
        return list(owners.items()), certificates

    def _look_in_time(self) -> None:
        if self._file is not None and time.monotonic() >= self._next_look:
            self._look()

    def _look(self) -> None:
        """Read the file again if it changed; one thread does, the others go on."""
        if self._file is None or not self._lock.acquire(blocking=False):
            return
        try:
            self._next_look = time.monotonic() + LOOK_EVERY_S
            stamp = _stamp(self._file)
            if stamp == self._stamp:
                return
            self._owners, self._certificates = self._read()
            self._stamp, self._problem = stamp, ""
            known = len(self._owners) + len(self._certificates)
            log.info("%s: read again, %d API keys in force", self._file, known)
        except ConfigError as error:
            self._stamp = None
            if str(error) != self._problem:
                self._problem = str(error)
                log.error("API keys were not read again, the former ones stay in force: %s", error)
        finally:
            self._lock.release()


class _ApiKeysFile(StrictModel):
    keys: list[ApiKey]


def read_keys_file(path: Path) -> list[ApiKey]:
    """The ``{name, role, key}`` entries of a YAML list; ConfigError never quotes a secret."""
    document = read_yaml(path, "API key file")
    if not isinstance(document.data, list):
        message = "expected a list of mappings with name, role, key"
        raise InvalidConfiguration([ConfigProblem(str(path), (), message)])

    def where(key: KeyPath) -> str:
        return place(str(path), document.lines, key[1:])

    return validate(_ApiKeysFile, {"keys": document.data}, where, document.faults).keys


def load_api_keys(settings: AuthSettings) -> ApiKeys:
    """Who may use the server, as ``auth`` says; a mode left out counts as ``off``.

    ConfigError when the key file is missing or wrong. A key file that others on the machine can
    read is logged as a warning (see ``key_file_warnings``).
    """
    if settings.mode != "api_key":
        return NoApiKeys()
    for warning in key_file_warnings(settings):
        log.warning("%s", warning)
    return ApiKeyRing(settings.keys, settings.keys_file)


def key_file_warnings(settings: AuthSettings) -> list[str]:
    """What is to be said of who may read the file of keys."""
    path = settings.keys_file
    if path is None or settings.mode != "api_key":
        return []
    try:
        mode = path.stat().st_mode
    except OSError:
        return []  # reading it says so, with the reason
    if mode & stat.S_IROTH:
        return [f"{path}: every user of this machine can read the API keys; try: chmod o-r {path}"]
    return []


def check_exposure(settings: Settings) -> None:
    """ConfigError when a port listens beyond loopback and ``auth.mode`` was left out."""
    if settings.auth.mode is not None:
        return
    server = settings.server
    exposed = [
        ConfigProblem("", ("server", *name, "host"), _exposed(at.host))
        for name, at in (
            (("http",), server.http),
            (("grpc",), server.grpc),
            (("grpc", "admin"), server.grpc and server.grpc.admin),
            (("admin",), server.admin),
        )
        if at is not None and not is_loopback(at.host)
    ]
    if exposed:
        raise InvalidConfiguration(exposed)


def _exposed(host: str) -> str:
    return (
        f"{host} can be reached from other machines, so auth.mode must be stated: api_key, or off "
        "to let everybody in"
    )


def _stamp(path: Path) -> Any:
    """What changes when the file does, also when a link is pointed elsewhere (mounted secrets)."""
    try:
        status = os.stat(path)
    except OSError as error:
        return error.errno
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino
