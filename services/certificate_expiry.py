"""Metrics for the expiry of the certificates in the settings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel

from hps.config import Settings
from hps.config.certificates import expiry
from hps.observability import metric_names as m
from hps.observability.metrics import Metrics

_OWN = ("certificate_file", "certificate")
_ROOTS = ("client_ca_file", "ca_file", "ca")
_READ_AGAIN = ("server.", "lookup.")
_KAFKAS = {"ssl.certificate.location": False, "ssl.ca.location": True}


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
    at_start = {file: file.expiry() for file in files if not file.setting.startswith(_READ_AGAIN)}

    def read_expiry() -> Iterator[tuple[tuple[str, ...], float]]:
        for file in files:
            end = at_start[file] if file in at_start else file.expiry()
            if end is not None:
                yield (file.setting,), end

    metrics.gauges(m.CERTIFICATE_EXPIRY, read_expiry)


def certificate_files(settings: Settings) -> list[CertificateFile]:
    """Certificate files in a deployment's settings, of all its processes."""
    found = list(_named(settings, ""))
    if settings.updates.kafka is not None:
        options = settings.updates.kafka.options
        for name, roots in _KAFKAS.items():
            if name in options:
                path = Path(str(options[name]))
                found.append(CertificateFile(f"updates.kafka.options.{name}", path, roots))
    return found


def _named(settings: BaseModel, within: str) -> Iterator[CertificateFile]:
    for name, value in settings:
        if isinstance(value, BaseModel):
            yield from _named(value, f"{within}{name}.")
        elif isinstance(value, Path) and name in (*_OWN, *_ROOTS):
            yield CertificateFile(f"{within}{name}", value, name in _ROOTS)
