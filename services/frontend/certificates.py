"""Certificates of a port, and the names in its clients' certificates; the same for every protocol."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Iterable, Mapping, Sequence
from ipaddress import ip_address
from typing import Any

from hps.config.certificates import check_current, no_password, unusable_file_error
from hps.config.reload_log import ReloadLog
from hps.config.server_settings import Listener, TlsSettings
from hps.errors import ConfigError

log = logging.getLogger(__name__)

_ADDRESS = "IP Address"
_KINDS = ("DNS", "URI", "email", _ADDRESS)


class PortCertificates:
    """Certificates of the port with this ``setting``. Not thread-safe.

    ``context`` uses the current ones; ``contents`` are the same as PEM."""

    def __init__(self, tls: TlsSettings, setting: str, protocols: Sequence[str] = ()) -> None:
        """Load the files. ``protocols``: offered by ALPN, if any.

        Raises ``ConfigError`` with those that cannot be used."""
        self._tls, self._setting, self._protocols = tls, setting, protocols
        self._log = ReloadLog("failed to reload certificates, keeping the former ones")
        self.contents = self._read()
        self.context = self._made()

    def renewed(self) -> bool:
        """Reload changed files; return True if there are new certificates.

        If they cannot be used, the former ones stay in force, which is logged once."""
        try:
            contents = self._read()
            changed = contents != self.contents
            if changed:
                self.context = self._made()
        except ConfigError as error:
            self._log.failed(error)
            return False
        self._log.succeeded()
        if changed:
            self.contents = contents
            log.info("%s: reloaded certificates", self._setting)
        return changed

    def _read(self) -> list[bytes]:
        tls = self._tls
        files = [path for path in (tls.key_file, tls.certificate_file, tls.client_ca_file) if path]
        try:
            return [path.read_bytes() for path in files]
        except OSError as error:
            raise ConfigError(f"{self._setting}.tls: {error.filename}: {error.strerror}") from None

    def _made(self) -> ssl.SSLContext:
        tls = self._tls
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # Verify certificates on every connection: no session resumption, which former roots may have
        # allowed.
        context.num_tickets = 0
        context.options |= ssl.OP_NO_TICKET
        if self._protocols:
            context.set_alpn_protocols(self._protocols)
        setting, used = f"{self._setting}.tls", f"{tls.certificate_file} and {tls.key_file}"
        try:
            context.load_cert_chain(tls.certificate_file, tls.key_file, no_password)
            if tls.client_ca_file is not None:
                used = str(tls.client_ca_file)
                context.load_verify_locations(tls.client_ca_file)
                context.verify_mode = ssl.CERT_REQUIRED
        except (OSError, ValueError) as error:
            raise unusable_file_error(setting, used, error) from None
        check_current(setting, tls.certificate_file)
        return context


def server_context(
    at: Listener, setting: str, protocols: Sequence[str] = ()
) -> ssl.SSLContext | None:
    """TLS context of a port on an event loop, by its ``setting``; None for plain text.

    ``protocols``: offered by ALPN. The next connection uses changed files. Raises as `PortCertificates`."""
    if at.tls is None:
        return None
    certificates = PortCertificates(at.tls, setting, protocols)

    def renew(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        certificates.renewed()
        connection.context = certificates.context

    listening = certificates.context
    listening.sni_callback = renew  # called for every connection, with or without a server name
    return listening


def certificate_names(certificate: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the alternative names and the common name in a ``certificate`` of Python's ``ssl``."""
    common = [v for part in certificate.get("subject", ()) for k, v in part if k == "commonName"]
    alternative = [
        str(ip_address(name)) if kind == _ADDRESS else name
        for kind, name in certificate.get("subjectAltName", ())
        if kind in _KINDS
    ]
    return alternative, common[:1]


def caller_names(alternative: Iterable[str], common: Iterable[str]) -> set[str]:
    """Names in a verified certificate: its alternative names, and ``CN=<name>`` for its common name.

    No alternative name has that prefix."""
    names = {name for name in alternative if not name.startswith("CN=")}
    return names | {f"CN={name}" for name in common}
