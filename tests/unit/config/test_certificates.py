"""Certificate files for connections to other servers: errors and expiry."""

from __future__ import annotations

import ssl
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from hps.config.certificates import ClientCertificates, client_context, valid_until
from hps.errors import ConfigError
from tests.support.certificates import expire, made


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``one.key``, ``one.crt``, the same of ``two``, ``old.crt``, ``locked``, ``text``."""
    folder = tmp_path_factory.mktemp("certificates")
    key, certificate = made(folder, "one", ["DNS:one.org"])
    made(folder, "two")
    old = folder / "old.crt"
    old.write_bytes(certificate.read_bytes())
    expire(old)
    (folder / "text").write_text("no certificate")
    lock = ["openssl", "ec", "-aes128", "-passout", "pass:secret", "-in", key]
    subprocess.run([*lock, "-out", folder / "locked"], check=True, capture_output=True)
    return folder


@pytest.mark.parametrize(
    ("ca", "certificate", "key", "problem"),
    [
        ("none", None, None, "x.tls: {}/none cannot be used: No such file or directory"),
        ("text", None, None, "x.tls: {}/text cannot be used: invalid PEM"),
        (None, "none", "one.key", "{0}/none and {0}/one.key cannot be used: No such file"),
        (None, "text", "one.key", "{0}/text and {0}/one.key cannot be used: invalid PEM"),
        (None, "one.crt", "text", "/text cannot be used: invalid PEM"),
        (None, "one.crt", "two.key", "cannot be used: the key does not match the certificate"),
        (None, "one.crt", "locked", "cannot be used: the key is encrypted"),
        (None, "old.crt", "one.key", "x.tls: {}/old.crt expired at 2020-01-01 00:00 UTC"),
    ],
)
def test_unusable_files_are_named_with_the_cause(
    pairs: Path, ca: str | None, certificate: str | None, key: str | None, problem: str
) -> None:
    files = [None if name is None else pairs / name for name in (ca, certificate, key)]
    with pytest.raises(ConfigError) as caught:
        client_context("x.tls", *files)
    assert problem.format(pairs) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_usable_files_are_accepted(pairs: Path) -> None:
    context = client_context("x.tls", pairs / "one.crt", pairs / "one.crt", pairs / "one.key")
    assert context.verify_mode == ssl.CERT_REQUIRED
    assert context.check_hostname
    assert client_context("x.tls", pairs, None, None).verify_mode == ssl.CERT_REQUIRED


def test_expiry_of_a_certificate_is_read(pairs: Path) -> None:
    der = ssl.PEM_cert_to_DER_cert((pairs / "one.crt").read_text())
    left = valid_until(der) - datetime.now(UTC)
    assert timedelta(days=1.9) < left < timedelta(days=2.1)


def test_expiry_after_2049_is_read(tmp_path: Path) -> None:
    """X.509 writes the year with four digits from 2050 on."""
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "20000", "-subj", "/CN=x", "-keyout", tmp_path / "key"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    left = valid_until(ssl.PEM_cert_to_DER_cert(done.stdout)) - datetime.now(UTC)
    assert timedelta(days=19_999) < left < timedelta(days=20_001)


def test_renewed_files_are_reloaded(
    pairs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """While new contents cannot be used, the former ones are."""
    ca, certificate, key = (tmp_path / name for name in ("ca", "certificate", "key"))

    def give(name: str) -> tuple[bytes, bytes, bytes]:
        contents = [(pairs / f"{name}.{kind}").read_bytes() for kind in ("crt", "crt", "key")]
        for path, content in zip((ca, certificate, key), contents, strict=True):
            path.write_bytes(content)
        return contents[0], contents[1], contents[2]

    one = give("one")
    files = ClientCertificates("x.tls", ca, certificate, key)
    assert files.now() == one
    key.write_bytes((pairs / "two.key").read_bytes())  # its certificate is not there yet
    for _ in range(2):
        assert files.now() == one
    (record,) = caplog.records
    assert "failed to reload certificates, keeping the former ones: x.tls: " in record.getMessage()
    assert files.now() == one
    assert give("two") == files.now() != one
    key.unlink()
    assert files.now()[2] == (pairs / "two.key").read_bytes()
    assert ClientCertificates("x.tls", None, None, None).now() == (None, None, None)


def test_folder_of_roots_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"x\.tls: .* cannot be used: Is a directory"):
        ClientCertificates("x.tls", tmp_path, None, None)
