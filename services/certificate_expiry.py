"""Until when certificates are valid that the settings name, for metrics."""

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
    """Certificates by the ``setting`` that names them."""

    setting: str
    path: Path
    roots: bool

    def expiry(self) -> float | None:
        return expiry(self.path, roots=self.roots)


def publish_expiry(metrics: Metrics, settings: Settings) -> None:
    """Gauges of it: of files that are read again when they change, as they are when metrics are asked for; of
    others as they were at the start, which is what is used."""
    files = certificate_files(settings)
    at_start = {file: file.expiry() for file in files if not file.setting.startswith(_READ_AGAIN)}

    def told() -> Iterator[tuple[tuple[str, ...], float]]:
        for file in files:
            end = at_start[file] if file in at_start else file.expiry()
            if end is not None:
                yield (file.setting,), end

    metrics.gauges(m.CERTIFICATE_EXPIRY, told)


def certificate_files(settings: Settings) -> list[CertificateFile]:
    """Those that a deployment's settings name, whichever of its processes uses them."""
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
