"""Certificates, read again when their files change: they are renewed while the server runs."""

from __future__ import annotations

import logging
from pathlib import Path

import grpc

from hps.config.server_settings import TlsSettings
from hps.errors import ConfigError

log = logging.getLogger(__name__)


def credentials(tls: TlsSettings, setting: str = "server.grpc") -> grpc.ServerCredentials:
    """What a port, by its ``setting``, shows and asks of its clients; ``ConfigError`` naming a file that
    cannot be read.

    Files that changed are taken over by the next connection; while they cannot be read, the former
    certificates stay in force.
    """
    read = _Certificates(tls, setting)
    return grpc.dynamic_ssl_server_credentials(
        read.now(), read.changed, require_client_authentication=tls.client_ca_file is not None
    )


class _Certificates:
    def __init__(self, tls: TlsSettings, setting: str) -> None:
        self._setting = setting
        self._files = [
            path for path in (tls.key_file, tls.certificate_file, tls.client_ca_file) if path
        ]
        self._contents = self._read()

    def now(self) -> grpc.ServerCertificateConfiguration:
        key, certificate, *ca = self._contents
        return grpc.ssl_server_certificate_configuration(
            [(key, certificate)], ca[0] if ca else None
        )

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        try:
            contents = self._read()
        except ConfigError as error:
            log.error("the former certificates stay in force: %s", error)
            return None
        if contents == self._contents:
            return None
        self._contents = contents
        log.info("certificates read again")
        return self.now()

    def _read(self) -> list[bytes]:
        return [_bytes(path, self._setting) for path in self._files]


def _bytes(path: Path, setting: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{setting}.tls: {path}: {error.strerror}") from None
