"""Validate a file without starting anything; collect all errors in it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hps.config.auth import ApiKeyRing, check_exposure, key_file_warnings, read_keys_file
from hps.config.certificates import client_context
from hps.config.loading import Configuration, load_config
from hps.config.model_file import load_model_spec
from hps.config.model_schema import ModelSpec
from hps.config.schema import Settings
from hps.config.secrets import read_secret
from hps.config.server_settings import AuthSettings
from hps.config.update_settings import KafkaSettings
from hps.config.yaml_text import read_yaml
from hps.errors import ConfigError, HpsError

_KAFKAS_FILE = re.compile(r"ssl\.(ca|certificate|key|keystore|crl)\.location")
_LOOKUPS_KEY = "lookup.api_key_file"
_PEERS_KEY = "models.peers_api_key_file"


@dataclass
class ValidationReport:
    """``kind`` is the detected type of the file; it is valid if there are no ``errors``."""

    kind: str
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    configuration: Configuration | None = None
    """The configuration of the file, if it is readable."""
    _absent: set[Path] = field(default_factory=set)

    def run(self, check: Callable[[], Any]) -> Any:
        """Return the check's result; if it fails, record its errors and return None."""
        try:
            return check()
        except HpsError as error:
            self.errors += str(error).splitlines()
            return None

    def run_file_check(self, each: FileCheck) -> None:
        """Run the check; a missing file is a warning, since secrets are often mounted only at the server."""
        absent = [file for file in each.files if not file.exists()]
        if not absent:
            self.run(each.check)
        for file in [file for file in absent if file not in self._absent]:
            self._absent.add(file)
            self.warnings.append(
                f"{each.setting}: {file} does not exist here; the server will not start without it"
            )


def validate_file(path: Path, overrides: Sequence[str] = ()) -> ValidationReport:
    """Validate a configuration, a ``ps.json``, a ``model.yaml`` or an API key file."""
    if path.suffix.lower() == ".json":
        return _configuration(ValidationReport("HPS's ps.json"), path, overrides)
    report = ValidationReport("configuration")
    data = report.run(lambda: read_yaml(path).data)
    if report.errors:
        return report
    if isinstance(data, list):
        report.kind = "API keys"
        report.run(lambda: read_keys_file(path))
    elif isinstance(data, dict) and _is_model(data):
        report.kind = "model description"
        report.run(lambda: load_model_spec(path))
    else:
        return _configuration(report, path, overrides)
    if overrides:
        report.errors.append(f"{path}: --set changes a configuration; this is a {report.kind} file")
    return report


def _is_model(data: Mapping[str, Any]) -> bool:
    """True if the file looks like a ``model.yaml``: more of its keys are of that than of the settings.

    ``dense`` is a key of both."""
    return len(data.keys() & ModelSpec.model_fields) > len(data.keys() & Settings.model_fields)


def _configuration(
    report: ValidationReport, path: Path, overrides: Sequence[str]
) -> ValidationReport:
    report.configuration = report.run(lambda: load_config(path, overrides))
    if report.configuration is None:
        return report
    report.warnings += report.configuration.warnings
    settings: Settings = report.configuration.settings
    report.run(lambda: check_exposure(settings))
    report.warnings += key_file_warnings(settings.auth)
    for each in file_checks(settings, settings.server.role):
        report.run_file_check(each)
    return report


@dataclass(frozen=True, slots=True)
class FileCheck:
    """A check of a ``setting``'s ``files``; ``check`` raises ConfigError if one cannot be used."""

    setting: str
    files: Sequence[Path]
    check: Callable[[], object]


def file_checks(settings: Settings, role: str) -> Iterator[FileCheck]:
    """Files of secrets, API keys and certificates that a process of ``role`` reads.

    ``role`` is a `server.role`, or ``ingest``. Certificates of ports are not included: they are read
    when the ports open."""
    for setting, path in secret_files(settings).items():
        read = partial(read_secret, path, setting, api_key=setting in (_LOOKUPS_KEY, _PEERS_KEY))
        yield FileCheck(setting, [path], read)
    auth = settings.auth
    if auth.mode == "api_key":
        files = [] if auth.keys_file is None else [auth.keys_file]
        yield FileCheck("auth.keys_file", files, partial(_check_keys, auth))
    if settings.updates.kafka is not None and role != "frontend":
        yield from kafka_files(settings.updates.kafka)
    redis, triton, lookup = settings.tiers.redis, settings.dense.triton, settings.lookup
    if role != "frontend" and redis is not None and (at_redis := redis.tls) is not None:
        yield _certificates("tiers.redis.tls", at_redis.ca, at_redis.certificate, at_redis.key)
    for setting, tls, roles in (
        ("dense.triton.tls", None if triton is None else triton.tls, ("all", "frontend")),
        ("lookup.tls", lookup.tls, ("frontend",)),
    ):
        if tls is not None and role in roles:
            yield _certificates(setting, tls.ca_file, tls.certificate_file, tls.key_file)


def check_files(settings: Settings, role: str) -> None:
    """Raise ConfigError if one of the files of `file_checks` cannot be used."""
    for each in file_checks(settings, role):
        each.check()


def secret_files(settings: Settings) -> dict[str, Path]:
    """Files of secrets that the role needs, by setting; without the file of API keys."""
    redis, kafka = settings.tiers.redis, settings.updates.kafka
    if settings.server.role == "frontend":
        key = settings.lookup.api_key_file
        return {} if key is None else {_LOOKUPS_KEY: key}
    files: dict[str, Path | None] = {_PEERS_KEY: settings.models.peers_api_key_file}
    if redis is not None:
        files["tiers.redis.password_file"] = redis.password_file
        files["tiers.redis.sentinel_password_file"] = redis.sentinel_password_file
    if kafka is not None:
        files |= {f"updates.kafka.options_files.{k}": v for k, v in kafka.options_files.items()}
    return {setting: path for setting, path in files.items() if path is not None}


def _check_keys(auth: AuthSettings) -> None:
    if auth.keys_file is not None and not auth.keys_file.is_file():
        read_secret(auth.keys_file, "auth.keys_file")
    ApiKeyRing(auth.keys, auth.keys_file)


def _certificates(
    setting: str, ca: Path | None, certificate: Path | None, key: Path | None
) -> FileCheck:
    files = [file for file in (ca, certificate, key) if file is not None]
    return FileCheck(setting, files, partial(client_context, setting, ca, certificate, key))


def check_folders(settings: Settings) -> None:
    """Raise ConfigError if a folder that a node writes to occasionally is not writable.

    Folders that it uses at the start are not checked: the start itself fails."""
    rocksdb, snapshot = settings.tiers.rocksdb, settings.tiers.cpu_cache.snapshot.path
    for setting, folder in (
        ("tiers.rocksdb.checkpoints", rocksdb.checkpoints if rocksdb.enabled else None),
        ("tiers.cpu_cache.snapshot.path", None if snapshot is None else snapshot.parent),
    ):
        if folder is None:
            continue
        ancestors = (folder, *folder.absolute().parents)
        existing = next(each for each in ancestors if each.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            raise ConfigError(
                f"{setting}: {existing} is not a folder that this process may write to; mount it "
                "writable, or set another one"
            )


def kafka_files(kafka: KafkaSettings) -> Iterator[FileCheck]:
    """Certificates and keys in the options of Kafka's client."""
    options = kafka.options
    named = {
        name: Path(str(value))
        for name, value in options.items()
        if _KAFKAS_FILE.fullmatch(name) and value != "probe"
    }
    for name, path in named.items():
        setting = f"updates.kafka.options.{name}"
        yield FileCheck(setting, [path], partial(_check_file, path, setting))
    if any("key.password" in name for name in (*options, *kafka.options_files)):
        return  # only Kafka's client can decrypt the key
    ca, certificate, key = (
        named.get(name)
        for name in ("ssl.ca.location", "ssl.certificate.location", "ssl.key.location")
    )
    if ca is not None or certificate is not None:
        yield _certificates("updates.kafka.options", ca, certificate, key)


def _check_file(path: Path, setting: str) -> None:
    try:
        if not path.is_dir():
            path.open("rb").close()
    except OSError as error:
        remedy = "mount it there, or correct the path"
        raise ConfigError(f"{setting}: {path}: {error.strerror}; {remedy}") from None
