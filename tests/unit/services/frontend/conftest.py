"""Ports with certificates, callers identified by theirs, and admission limits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from hps.config import Settings
from hps.config.admission_settings import AdmissionSettings
from hps.config.auth import load_api_keys
from hps.config.server_settings import AuthSettings
from hps.observability import metric_names as m
from services.frontend.auth import Authorizer, guard
from services.frontend.state import FrontendState
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


@pytest.fixture
def limit(small: Any) -> Callable[..., None]:
    """``limit(**settings)``: serve the small node with these of `server.admission`.

    By default two requests run and three are queued."""

    def apply(**settings: Any) -> None:
        admission = AdmissionSettings(
            **{"running": 2, "queue": 3, "max_wait_ms": 60_000, **settings}
        )
        server = small.settings.model_copy(update={"admission": admission})
        small.state = FrontendState(settings=Settings(server=server))
        small.state.serve(small.node)

    return apply


def load(small: Any, name: str = "ctr") -> tuple[int, int]:
    """Running and queued requests to ``name``."""
    queue = small.state.entries[name].endpoint
    return queue.running, queue.queued


def rejections(small: Any) -> dict[str, float]:
    """Rejected requests by reason."""
    counted = small.node.metrics.numbers()[m.REQUESTS_REFUSED]
    return {labels[0]: n for labels, n in counted.items()}
