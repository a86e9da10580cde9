"""Metrics for the expiry of the certificates in the settings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hps.config import Settings
from hps.config.certificates import expiry
from hps.observability import metric_names as m
from hps.observability.metrics import Metrics
from services.frontend.path_redaction import settings_paths

_CERTIFICATES = ("certificate_file", "certificate")
_ROOTS = ("client_ca_file", "ca_file", "ca")
_RELOADED = ("server.", "lookup.")
_KAFKA_OPTIONS = {"ssl.certificate.location": False, "ssl.ca.location": True}


class CertificateFile(NamedTuple):
    """A certificate file of a ``setting``."""

    setting: str
    path: Path
    roots: bool

    def expiry(self) -> float | None:
        return expiry(self.path, roots=self.roots)


def publish_expiry(metrics: Metrics, settings: Settings) -> None:
    """Export the expiry of certificates as gauges.

    Files that are reloaded when they change are read at each exposition; of others, the expiry at the start
    is exported, since those contents are in use."""
    files = certificate_files(settings)
    at_start = {file: file.expiry() for file in files if not file.setting.startswith(_RELOADED)}

    def read_expiry() -> Iterator[tuple[tuple[str, ...], float]]:
        for file in files:
            end = at_start[file] if file in at_start else file.expiry()
            if end is not None:
                yield (file.setting,), end

    metrics.gauges(m.CERTIFICATE_EXPIRY, read_expiry)


def certificate_files(settings: Settings) -> list[CertificateFile]:
    """Certificate files in a deployment's settings, of all its processes."""
    found = []
    for setting, path in settings_paths(settings):
        name = setting.rpartition(".")[2]
        if name in _CERTIFICATES or name in _ROOTS:
            found.append(CertificateFile(setting, path, name in _ROOTS))
    if settings.updates.kafka is not None:
        options = settings.updates.kafka.options
        for name, roots in _KAFKA_OPTIONS.items():
            if name in options:
                path = Path(str(options[name]))
                found.append(CertificateFile(f"updates.kafka.options.{name}", path, roots))
    return found
