"""Certificates in PEM files. Errors are reported at start, in one line that names the setting."""

from __future__ import annotations

import logging
import re
import ssl
from base64 import b64decode
from datetime import UTC, datetime
from pathlib import Path

from hps.config.reload_log import ReloadLog
from hps.errors import ConfigError

log = logging.getLogger(__name__)

_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----(.+?)-----END CERTIFICATE-----", re.S)
_VERSION, _UTC_TIME = 0xA0, 0x17


def client_context(
    setting: str, ca: Path | None, certificate: Path | None, key: Path | None
) -> ssl.SSLContext:
    """TLS context for connections to servers.

    ``ca`` is a file or folder of trusted roots (None: the system's); ``certificate`` is the client's,
    or None.
    Raises ConfigError with ``setting`` and the file if one of them cannot be used."""
    folder = ca is not None and ca.is_dir()
    try:
        context = ssl.create_default_context(
            cafile=None if folder else ca, capath=ca if folder else None
        )
    except (OSError, ValueError) as error:
        raise unusable_file_error(setting, str(ca), error) from None
    if certificate is not None:
        try:
            context.load_cert_chain(certificate, key, no_password)
        except (OSError, ValueError) as error:
            used = f"{certificate} and {key}" if key is not None else f"{certificate}"
            raise unusable_file_error(setting, used, error) from None
        check_current(setting, certificate)
    return context


class ClientCertificates:
    """Contents of a client's PEM files, which may be renewed while in use. Not thread-safe."""

    def __init__(
        self, setting: str, ca: Path | None, certificate: Path | None, key: Path | None
    ) -> None:
        """Read the files. Raises ConfigError as `client_context` does, and for a folder."""
        self._setting, self._files = setting, (ca, certificate, key)
        self._log = ReloadLog("failed to reload certificates, keeping the former ones")
        self._contents = self._read()
        client_context(setting, *self._files)

    def now(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """Read roots, certificate and key; None for those without a file.

        If the files cannot be used, the former contents are returned, and the error is logged once."""
        try:
            contents = self._read()
            if contents != self._contents:
                client_context(self._setting, *self._files)
                log.info("%s: reloaded certificates", self._setting)
            self._contents = contents
            self._log.succeeded()
        except ConfigError as error:
            self._log.failed(error)
        return self._contents

    def _read(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        try:
            ca, certificate, key = [
                None if path is None else path.read_bytes() for path in self._files
            ]
        except OSError as error:
            raise unusable_file_error(self._setting, str(error.filename), error) from None
        return ca, certificate, key


def check_current(setting: str, certificate: Path) -> None:
    """Raise ConfigError if the first certificate of the file has expired."""
    first = _PEM.search(certificate.read_bytes())
    if first is None:
        return
    end = valid_until(b64decode(first[1]))
    if end < datetime.now(UTC):
        raise ConfigError(
            f"{setting}: {certificate} expired at {end:%Y-%m-%d %H:%M} UTC; renew the certificate"
        )


def expiry(certificates: Path, *, roots: bool = False) -> float | None:
    """Expiry of a file's certificates in Unix seconds; None if none can be read.

    It is the earliest one. For ``roots`` it is the latest: new ones are added before old ones expire."""
    try:
        bodies = _PEM.findall(certificates.read_bytes())
        ends = [valid_until(b64decode(body)).timestamp() for body in bodies]
    except (OSError, ValueError, IndexError):
        return None
    return (max if roots else min)(ends, default=None)


def unusable_file_error(setting: str, used: str, error: Exception) -> ConfigError:
    """Error for files that OpenSSL rejects."""
    return ConfigError(f"{setting}: {used} cannot be used: {_why(error)}")


def no_password() -> str:
    """Password callback that rejects encrypted keys; without one, OpenSSL prompts on the terminal."""
    raise ValueError("the key is encrypted; use an unencrypted one that only this process can read")


def _why(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        if error.reason == "KEY_VALUES_MISMATCH":
            return "the key does not match the certificate"
        return f"invalid PEM ({error.reason or error})"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error)


def valid_until(der: bytes) -> datetime:
    """Parse the end of an X.509 certificate's validity (RFC 5280, 4.1)."""

    def item(at: int) -> tuple[int, int, int]:
        """Tag, start and end of the contents of the DER element at ``at``."""
        length, begin = der[at + 1], at + 2
        if length & 0x80:
            begin += length & 0x7F
            length = int.from_bytes(der[at + 2 : begin])
        return der[at], begin, begin + length

    _, at, _ = item(0)
    _, at, _ = item(at)
    if der[at] == _VERSION:
        _, _, at = item(at)
    for _serial_algorithm_issuer in range(3):
        _, _, at = item(at)
    _, at, _ = item(at)
    _, _, at = item(at)  # notBefore
    tag, begin, end = item(at)
    form = "%y%m%d%H%M%SZ" if tag == _UTC_TIME else "%Y%m%d%H%M%SZ"
    return datetime.strptime(der[begin:end].decode("ascii"), form).replace(tzinfo=UTC)
