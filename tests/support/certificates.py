"""Keys and certificates for tests of TLS, made with openssl."""

from __future__ import annotations

import re
import ssl
import subprocess
from collections.abc import Sequence
from pathlib import Path

Made = tuple[Path, Path]
"""The files of a key and of its certificate."""


def made(folder: Path, common: str, names: Sequence[str] = (), ca: Made | None = None) -> Made:
    """A key and a certificate for ``common`` and its other ``names`` (``DNS:…``, ``URI:…``), self-signed or
    by ``ca``."""
    key, certificate = folder / f"{common}.key", folder / f"{common}.crt"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "2", "-subj", f"/CN={common}"]
    command += ["-keyout", str(key), "-out", str(certificate)]
    if ca is not None:
        command += ["-CA", str(ca[1]), "-CAkey", str(ca[0])]
        command += ["-addext", "basicConstraints=critical,CA:FALSE"]
    if names:
        command += ["-addext", f"subjectAltName={','.join(names)}"]
    subprocess.run(command, check=True, capture_output=True)
    return key, certificate


def expire(certificate: Path) -> None:
    """Have the file say that its certificate was valid until the beginning of 2020. Whoever checks the
    signature notices."""
    der = ssl.PEM_cert_to_DER_cert(certificate.read_text())
    _begin, end = re.findall(rb"\x17\x0d\d{12}Z", der)
    old = der.replace(end, b"\x17\x0d200101000000Z")
    certificate.write_text(ssl.DER_cert_to_PEM_cert(old))
