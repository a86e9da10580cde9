"""Certificates in PEM files: what is wrong with them is told at start, in one line that names the setting."""

from __future__ import annotations

import re
import ssl
from base64 import b64decode
from datetime import UTC, datetime
from pathlib import Path

from hps.errors import ConfigError

_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----(.+?)-----END CERTIFICATE-----", re.S)
_VERSION, _UTC_TIME = 0xA0, 0x17


def client_context(
    setting: str, ca: Path | None, certificate: Path | None, key: Path | None
) -> ssl.SSLContext:
    """For connections to servers whose certificates lead to a root of ``ca``, a file or a folder (None: the
    system's), and which are shown ``certificate``, if it is given. ConfigError that names ``setting`` and the
    file when one cannot be used."""
    folder = ca is not None and ca.is_dir()
    try:
        context = ssl.create_default_context(
            cafile=None if folder else ca, capath=ca if folder else None
        )
    except (OSError, ValueError) as error:
        raise unusable(setting, str(ca), error) from None
    if certificate is not None:
        try:
            context.load_cert_chain(certificate, key, no_password)
        except (OSError, ValueError) as error:
            used = f"{certificate} and {key}" if key is not None else f"{certificate}"
            raise unusable(setting, used, error) from None
        check_current(setting, certificate)
    return context


def check_current(setting: str, certificate: Path) -> None:
    """ConfigError when the first certificate of the file is valid no more."""
    found = _PEM.search(certificate.read_bytes())
    if found is None:
        return
    end = valid_until(b64decode(found[1]))
    if end < datetime.now(UTC):
        raise ConfigError(
            f"{setting}: {certificate} was valid until {end:%Y-%m-%d %H:%M} UTC; renew the certificate"
        )


def unusable(setting: str, used: str, error: Exception) -> ConfigError:
    """For files that OpenSSL does not take."""
    return ConfigError(f"{setting}: {used} cannot be used: {_why(error)}")


def no_password() -> str:
    """OpenSSL asks for a password on the terminal unless it is given a function."""
    raise ValueError("the key is encrypted; give one that is not, readable by this process only")


def _why(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        if error.reason == "KEY_VALUES_MISMATCH":
            return "the key is not the certificate's"
        return f"not what PEM looks like ({error.reason or error})"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error)


def valid_until(der: bytes) -> datetime:
    """The end of an X.509 certificate's validity (RFC 5280, 4.1)."""

    def item(at: int) -> tuple[int, int, int]:
        """Tag, beginning and end of the contents of what stands at ``at``."""
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
    _, _, at = item(at)  # from when on it is valid
    tag, begin, end = item(at)
    form = "%y%m%d%H%M%SZ" if tag == _UTC_TIME else "%Y%m%d%H%M%SZ"
    return datetime.strptime(der[begin:end].decode("ascii"), form).replace(tzinfo=UTC)
