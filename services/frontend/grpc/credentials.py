"""TLS credentials of a gRPC port."""

from __future__ import annotations

import grpc

from hps.config.server_settings import TlsSettings
from services.frontend.certificates import PortCertificates


def credentials(tls: TlsSettings, setting: str = "server.grpc") -> grpc.ServerCredentials:
    """Return the credentials of the port whose setting is named ``setting``.

    The next connection uses files that have changed. Raises ``ConfigError`` naming unusable files.
    """
    certificates = PortCertificates(tls, setting)

    def now() -> grpc.ServerCertificateConfiguration:
        key, certificate, *roots = certificates.contents
        return grpc.ssl_server_certificate_configuration([(key, certificate)], *roots)

    return grpc.dynamic_ssl_server_credentials(
        now(),
        lambda: now() if certificates.renewed() else None,
        require_client_authentication=tls.client_ca_file is not None,
    )
