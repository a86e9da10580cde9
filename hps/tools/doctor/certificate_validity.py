"""Remaining validity of certificates: this server's own, and those that others present."""

from __future__ import annotations

import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from hps.tools.doctor.check import DoctorCheck

if TYPE_CHECKING:
    from hps.client import Tls

WARN_DAYS = 14


def validity(name: str, end: datetime | None, of: str) -> DoctorCheck:
    """``end``: expiry of a certificate that is valid now; None if unknown."""
    if end is None:
        return DoctorCheck(name, "OK", of)
    days = (end - datetime.now(UTC)).days
    found = f"{of}, valid until {end:%Y-%m-%d %H:%M} UTC"
    if days >= WARN_DAYS:
        return DoctorCheck(name, "OK", found)
    remedy = "renew it; servers take over files that change, without a restart"
    return DoctorCheck(name, "WARN", f"{found}: {days} days", remedy)


def file(name: str, certificate: Path) -> DoctorCheck:
    from hps.config.certificates import expiry

    end = expiry(certificate)
    known = None if end is None else datetime.fromtimestamp(end, UTC)
    return validity(name, known, str(certificate))


def shown(name: str, url: str, tls: Tls | None, timeout_s: float) -> DoctorCheck:
    """Check the certificate that the server at ``url`` presents. Raises OSError."""
    from hps.client.address import address
    from hps.config.certificates import valid_until

    at = address(url, tls)
    assert at.tls is not None
    with (
        socket.create_connection((at.host, at.port), timeout_s) as plain,
        at.tls.context().wrap_socket(plain, server_hostname=at.host) as secured,
    ):
        found = secured.getpeercert(binary_form=True)
    return validity(name, None if found is None else valid_until(found), at.target)
