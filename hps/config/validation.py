"""Checks a file without starting anything, and collects every mistake in it."""

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


@dataclass
class ValidationReport:
    """``kind`` is what the file was taken for; it is in order when there are no ``errors``."""

    kind: str
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    configuration: Configuration | None = None
    """The configuration in the file, if it can be read."""
    _absent: set[Path] = field(default_factory=set)

    def run(self, check: Callable[[], Any]) -> Any:
        """The check's result; None when it failed, its errors then stand in the report."""
        try:
            return check()
        except HpsError as error:
            self.errors += str(error).splitlines()
            return None

    def run_file_check(self, each: FileCheck) -> None:
        """The same, but a file that is not here is a warning: secrets are often mounted only where the server
        runs."""
        absent = [file for file in each.files if not file.exists()]
        if not absent:
            self.run(each.check)
        for file in [file for file in absent if file not in self._absent]:
            self._absent.add(file)
            self.warnings.append(
                f"{each.setting}: there is no {file} here; the server will not start without it"
            )


def validate_file(path: Path, overrides: Sequence[str] = ()) -> ValidationReport:
    """Judge a configuration, a ``ps.json``, a ``model.yaml`` or an API key file."""
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
        report.errors.append(f"{path}: --set changes a configuration, and this is none")
    return report


def _is_model(data: Mapping[str, Any]) -> bool:
    """Whether more of the keys are those of a ``model.yaml``; ``dense`` is a key of both."""
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
    """A check of ``files`` that a ``setting`` names; ``check`` raises ConfigError when one cannot be used."""

    setting: str
    files: Sequence[Path]
    check: Callable[[], object]


def file_checks(settings: Settings, role: str) -> Iterator[FileCheck]:
    """The files of secrets, API keys and certificates that a process of that role reads (as `server.role`, or
    ``ingest``), but for the certificates of its ports, which are read when they open."""
    for setting, path in secret_files(settings).items():
        read = partial(read_secret, path, setting, api_key=setting == _LOOKUPS_KEY)
        yield FileCheck(setting, [path], read)
    auth = settings.auth
    if auth.mode == "api_key":
        files = [] if auth.keys_file is None else [auth.keys_file]
        yield FileCheck("auth.keys_file", files, partial(_check_keys, auth))
    if settings.updates.kafka is not None and role != "frontend":
        yield from kafka_files(settings.updates.kafka)
    redis, triton, lookup = settings.tiers.redis, settings.dense.triton, settings.lookup
    if role != "frontend" and redis is not None and (at_redis := redis.tls) is not None:
        shown = at_redis.certificate, at_redis.key
        yield _certificates("tiers.redis.tls", at_redis.ca, *shown)
    for setting, tls, roles in (
        ("dense.triton.tls", None if triton is None else triton.tls, ("all", "frontend")),
        ("lookup.tls", lookup.tls, ("frontend",)),
    ):
        if tls is not None and role in roles:
            yield _certificates(setting, tls.ca_file, tls.certificate_file, tls.key_file)


def check_files(settings: Settings, role: str) -> None:
    """ConfigError when one of the files of `file_checks` cannot be used."""
    for each in file_checks(settings, role):
        each.check()


def secret_files(settings: Settings) -> dict[str, Path]:
    """The files of secrets that the settings name and the process's role needs, by setting; but for that of
    API keys."""
    redis, kafka = settings.tiers.redis, settings.updates.kafka
    if settings.server.role == "frontend":
        key = settings.lookup.api_key_file
        return {} if key is None else {_LOOKUPS_KEY: key}
    named: dict[str, Path | None] = {}
    if redis is not None:
        named["tiers.redis.password_file"] = redis.password_file
        named["tiers.redis.sentinel_password_file"] = redis.sentinel_password_file
    if kafka is not None:
        named |= {f"updates.kafka.options_files.{k}": v for k, v in kafka.options_files.items()}
    return {setting: path for setting, path in named.items() if path is not None}


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
    """ConfigError when a node could not write what it is to write now and then; what it needs at the start it
    finds out by itself."""
    rocksdb, snapshot = settings.tiers.rocksdb, settings.tiers.cpu_cache.snapshot.path
    for setting, folder in (
        ("tiers.rocksdb.checkpoints", rocksdb.checkpoints if rocksdb.enabled else None),
        ("tiers.cpu_cache.snapshot.path", None if snapshot is None else snapshot.parent),
    ):
        if folder is None:
            continue
        there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            raise ConfigError(
                f"{setting}: {there} is no folder that this process may write to; mount it writable, or name "
                "another one"
            )


def kafka_files(kafka: KafkaSettings) -> Iterator[FileCheck]:
    """The certificates and keys that its client's options name."""
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
        return  # its client alone can read the key
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
        mend = "mount it there, or correct the path"
        raise ConfigError(f"{setting}: {path}: {error.strerror}; {mend}") from None
