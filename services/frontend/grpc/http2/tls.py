"""TLS of a gRPC port: HTTP/2 by ALPN, and the names in a client's certificate."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping, Sequence

from hps.config.server_settings import GrpcListener
from services.frontend.certificates import certificate_names, server_context

ALPN = "h2"


def grpc_server_context(at: GrpcListener, setting: str) -> ssl.SSLContext | None:
    """TLS context of the port ``at``, named ``setting``; None for plain text.

    The next connection uses changed files. Raises ``ConfigError`` naming unusable files."""
    return server_context(at, setting, (ALPN,))


def certificate_properties(transport: asyncio.BaseTransport) -> Mapping[str, Sequence[bytes]]:
    """Names in the client's certificate, which TLS has verified, as grpc's ``auth_context`` has them."""
    certificate = transport.get_extra_info("peercert")
    if not certificate:
        return {}
    alternative, common = certificate_names(certificate)
    return {
        "x509_common_name": [name.encode() for name in common],
        "x509_subject_alternative_name": [name.encode() for name in alternative],
    }
