"""Checks one file without starting anything, and collects all that is wrong with it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hps.config.auth import check_exposure, key_file_warnings, load_api_keys, read_keys_file
from hps.config.certificates import client_context
from hps.config.loading import load_config
from hps.config.model_file import load_model_spec
from hps.config.schema import Settings
from hps.config.secrets import read_secret
from hps.config.update_settings import KafkaSettings
from hps.config.yaml_text import read_yaml
from hps.errors import ConfigError

_KAFKAS_FILE = re.compile(r"ssl\.(ca|certificate|key|keystore|crl)\.location")
_LOOKUPS_KEY = "lookup.api_key_file"
_NOT_WITHOUT = "the server will not start without"


@dataclass
class Report:
    """``kind`` is what the file was taken for; it is in order when there are no ``errors``."""

    kind: str
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def run(self, check: Callable[[], Any]) -> Any:
        """The check's result; None when it failed, its errors then stand in the report."""
        try:
            return check()
        except ConfigError as error:
            self.errors += str(error).splitlines()
            return None


def validate_file(path: Path, overrides: Sequence[str] = ()) -> Report:
    """Judge a configuration, a ``ps.json``, a ``model.yaml`` or an API key file."""
    if path.suffix.lower() == ".json":
        return _configuration(Report("HPS's ps.json"), path, overrides)
    report = Report("configuration")
    data = report.run(lambda: read_yaml(path).data)
    if report.errors:
        return report
    if isinstance(data, list):
        report.kind = "API keys"
        report.run(lambda: read_keys_file(path))
    elif isinstance(data, dict) and "tables" in data and not set(data) & set(Settings.model_fields):
        report.kind = "model description"
        report.run(lambda: load_model_spec(path))
    else:
        return _configuration(report, path, overrides)
    if overrides:
        report.errors.append(f"{path}: --set changes a configuration, and this is none")
    return report


def _configuration(report: Report, path: Path, overrides: Sequence[str]) -> Report:
    configuration = report.run(lambda: load_config(path, overrides))
    if configuration is None:
        return report
    report.warnings += configuration.warnings
    settings: Settings = configuration.settings
    report.run(lambda: check_exposure(settings))
    # Secrets are often mounted only where the server runs.
    for setting, file in secret_files(settings).items():
        if file.exists():
            report.run(partial(read_secret, file, setting, api_key=setting == _LOOKUPS_KEY))
        else:
            report.warnings.append(f"{setting}: there is no {file} here; {_NOT_WITHOUT}")
    keys = settings.auth.keys_file
    if settings.auth.mode == "api_key" and keys is not None and not keys.exists():
        report.warnings.append(f"{keys}: no such API key file here; {_NOT_WITHOUT}")
    else:
        report.warnings += key_file_warnings(settings.auth)
        report.run(lambda: load_api_keys(settings.auth))
    return report


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


def check_files(settings: Settings) -> None:
    """ConfigError when a secret that stands in a file, or a file that Kafka's client is told of, cannot be
    read."""
    for setting, path in secret_files(settings).items():
        read_secret(path, setting, api_key=setting == _LOOKUPS_KEY)
    keys = settings.auth.keys_file
    if settings.auth.mode == "api_key" and keys is not None:
        if not keys.is_file():
            read_secret(keys, "auth.keys_file")
        read_keys_file(keys)
    if settings.updates.kafka is not None and settings.server.role != "frontend":
        _check_kafkas_files(settings.updates.kafka)


def check_certificates(settings: Settings, role: str) -> None:
    """ConfigError for certificates that a process of that role (as `server.role`, or ``ingest``) trusts, or
    shows to others, and that cannot be used. Those of its ports it reads when it listens."""
    redis, triton, lookup = settings.tiers.redis, settings.dense.triton, settings.lookup
    if role != "frontend" and redis is not None and (at_redis := redis.tls) is not None:
        client_context("tiers.redis.tls", at_redis.ca, at_redis.certificate, at_redis.key)
    for setting, tls, roles in (
        ("dense.triton.tls", None if triton is None else triton.tls, ("all", "frontend")),
        ("lookup.tls", lookup.tls, ("frontend",)),
    ):
        if tls is not None and role in roles:
            client_context(setting, tls.ca_file, tls.certificate_file, tls.key_file)


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


def _check_kafkas_files(kafka: KafkaSettings) -> None:
    options = kafka.options
    for name, value in options.items():
        if _KAFKAS_FILE.fullmatch(name) and value != "probe":
            _check_file(Path(str(value)), f"updates.kafka.options.{name}")
    if any("key.password" in name for name in (*options, *kafka.options_files)):
        return  # its client alone can read the key
    ca, certificate, key = (
        Path(str(options[name])) if name in options and options[name] != "probe" else None
        for name in ("ssl.ca.location", "ssl.certificate.location", "ssl.key.location")
    )
    if ca is not None or certificate is not None:
        client_context("updates.kafka.options", ca, certificate, key)


def _check_file(path: Path, setting: str) -> None:
    try:
        if not path.is_dir():
            path.open("rb").close()
    except OSError as error:
        mend = "mount it there, or correct the path"
        raise ConfigError(f"{setting}: {path}: {error.strerror}; {mend}") from None
