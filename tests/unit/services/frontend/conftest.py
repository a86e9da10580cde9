"""Ports with certificates, and callers known by theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from hps.config.auth import load_api_keys
from hps.config.server_settings import AuthSettings
from services.frontend.auth import Authorizer, guard
from tests.support.certificates import Made, made

CALLERS = [
    {"name": "front", "role": "read", "certificate": "spiffe://x.org/front"},
    {"name": "trainer", "role": "write", "certificate": "trainer.x.org"},
    {"name": "operator", "role": "admin", "certificate": "CN=operator"},
    {"name": "script", "role": "admin", "key": "s" * 16},
]


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Made]:
    folder = tmp_path_factory.mktemp("certificates")
    ca = made(folder, "ca")
    found = {"ca": ca, "server": made(folder, "server", ["DNS:localhost"], ca)}
    found["front"] = made(folder, "anyone", ["DNS:a.x.org", "URI:spiffe://x.org/front"], ca)
    found["trainer"] = made(folder, "t", ["DNS:trainer.x.org"], ca)
    found["operator"] = made(folder, "operator", [], ca)
    # Not the common name, but an alternative one that looks like it.
    found["liar"] = made(folder, "liar", ["email:CN=operator"], ca)
    found["both"] = made(folder, "operator2", ["DNS:trainer.x.org", "URI:spiffe://x.org/front"], ca)
    return found


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.yaml"
    path.write_text(yaml.safe_dump(CALLERS))
    path.chmod(0o600)
    return path


@pytest.fixture
def by_certificate(keys_file: Path) -> Authorizer:
    return guard(load_api_keys(AuthSettings(mode="api_key", keys_file=keys_file)))


@pytest.fixture
def tls(certificates: dict[str, Made]) -> dict[str, Any]:
    """Settings of a port that wants its clients' certificates."""
    key, certificate = certificates["server"]
    return {
        "key_file": key,
        "certificate_file": certificate,
        "client_ca_file": certificates["ca"][1],
    }
