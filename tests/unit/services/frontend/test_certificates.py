"""Errors for unusable certificate files, for all protocols."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hps.config.server_settings import TlsSettings
from hps.errors import ConfigError
from services.frontend.certificates import PortCertificates, caller_names
from tests.support.certificates import expire


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"key_file": "none"}, r"server\.x\.tls: .*/none: No such file or directory"),
        ({"certificate_file": "text"}, r"/text and .*/server\.key cannot be used: invalid PEM"),
        ({"key_file": "text"}, r"/server\.crt and .*/text cannot be used: invalid PEM"),
        ({"key_file": "other"}, "cannot be used: the key does not match the certificate"),
        ({"key_file": "locked"}, "cannot be used: the key is encrypted"),
        (
            {"certificate_file": "old"},
            r"server\.x\.tls: [^ ]*/old expired at 2020-01-01 00:00",
        ),
        ({"client_ca_file": "text"}, r"server\.x\.tls: [^ ]*/text cannot be used: invalid PEM"),
    ],
)
def test_unusable_files_are_reported(certificates, tls, tmp_path: Path, changed, problem) -> None:
    (tmp_path / "text").write_text("no certificate")
    (tmp_path / "other").write_bytes(certificates["front"][0].read_bytes())
    (tmp_path / "old").write_bytes(tls["certificate_file"].read_bytes())
    expire(tmp_path / "old")
    lock = ["openssl", "ec", "-aes128", "-passout", "pass:secret", "-in", tls["key_file"]]
    subprocess.run([*lock, "-out", tmp_path / "locked"], check=True, capture_output=True)
    used = tls | {name: tmp_path / file for name, file in changed.items()}
    with pytest.raises(ConfigError, match=problem) as caught:
        PortCertificates(TlsSettings(**used), "server.x")
    assert "\n" not in str(caught.value)


def test_alternative_name_is_not_a_common_name() -> None:
    assert caller_names(["a.org", "CN=root"], ["me"]) == {"a.org", "CN=me"}
