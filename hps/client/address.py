"""Server addresses and TLS settings."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from hps.errors import ConfigError

_PORTS = {"http": 80, "https": 443, "grpc": 8001, "grpcs": 8001}


class Tls(NamedTuple):
    """PEM files: trusted roots (None: the system's), and the client's certificate and key."""

    ca_file: Path | str | None = None
    certificate_file: Path | str | None = None
    key_file: Path | str | None = None

    def context(self) -> ssl.SSLContext:
        """An SSL context. Raises ConfigError if a file cannot be used."""
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
            if self.certificate_file is not None:
                context.load_cert_chain(self.certificate_file, self.key_file)
        except (OSError, ssl.SSLError) as error:
            files = ", ".join(str(file) for file in self if file is not None)
            raise ConfigError(f"{files}: not usable for TLS: {error}") from None
        return context

    def contents(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """Roots, key and certificate. Raises ConfigError if a file cannot be read."""
        try:
            ca, certificate, key = (None if f is None else Path(f).read_bytes() for f in self)
        except OSError as error:
            raise ConfigError(f"{error.filename}: {error.strerror}") from None
        return ca, key, certificate


class ServerAddress(NamedTuple):
    """A parsed address; paths are appended to ``base``."""

    base: str
    scheme: str
    host: str
    port: int
    path: str
    tls: Tls | None

    @property
    def is_grpc(self) -> bool:
        return self.scheme.startswith("grpc")

    @property
    def target(self) -> str:
        """``host:port``."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def address(
    url: str, tls: Tls | None = None, schemes: tuple[str, ...] = tuple(_PORTS)
) -> ServerAddress:
    """Parse ``url``; ``host:port`` alone means http. Raises ConfigError."""
    base = (url if "://" in url else f"http://{url}").rstrip("/")
    parts = urlsplit(base)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if parts.scheme not in schemes or not host:
        known = " or ".join(f"{scheme}://host:port" for scheme in schemes if scheme[-1] != "s")
        raise ConfigError(f"server address {url!r} must look like {known}")
    secured = parts.scheme.endswith("s")
    if tls is not None and not secured:
        raise ConfigError(
            f"TLS is set, but server address {url!r} is without TLS; write {parts.scheme}s://…"
        )
    used = (tls or Tls()) if secured else None
    return ServerAddress(base, parts.scheme, host, port or _PORTS[parts.scheme], parts.path, used)
