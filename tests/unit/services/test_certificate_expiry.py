"""Metrics for the expiry of certificates in the settings."""

import time

import pytest

from hps.config import as_configuration
from hps.config.certificates import expiry
from hps.observability import metric_names as m
from hps.observability.metrics import Metrics
from services.certificate_expiry import publish_expiry
from tests.support.certificates import expire, made
from tests.support.redis_servers import need

DAY_S = 86_400
OLD_S = 1_577_836_800  # 2020-01-01


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A key and its certificate, valid for two days."""
    need("openssl")
    return made(tmp_path_factory.mktemp("certificates"), "one")


def test_first_expiry_counts_but_the_last_of_roots(pair, tmp_path):
    old = tmp_path / "old.crt"
    old.write_text(pair[1].read_text())
    expire(old)
    both = tmp_path / "both.crt"
    both.write_text(pair[1].read_text() + old.read_text())
    assert expiry(both) == expiry(old) == OLD_S
    assert expiry(both, roots=True) == expiry(pair[1])
    assert abs(expiry(pair[1]) - time.time() - 2 * DAY_S) < DAY_S
    both.write_text("no certificate")
    assert expiry(both) is None
    assert expiry(tmp_path / "none.crt") is None


def test_reloaded_files_are_read_again_and_others_keep_their_expiry_at_start(pair, tmp_path):
    key, certificate = pair
    port, client = tmp_path / "port.crt", tmp_path / "client.crt"
    for each in (port, client):
        each.write_text(certificate.read_text())
    expire(port)
    expire(client)
    tls = {"certificate_file": str(port), "key_file": str(key)}
    redis_tls = {"ca": str(certificate), "certificate": str(client), "key": str(key)}
    options = {"ssl.ca.location": str(certificate), "ssl.certificate.location": "nowhere"}
    kafka = {"brokers": "127.0.0.1:1", "options": options}
    settings = as_configuration(
        {
            "server": {"grpc": {"tls": tls, "admin": {"tls": tls}}},
            "lookup": {"tls": {**tls, "ca_file": str(certificate)}},
            "tiers": {"redis": {"tls": redis_tls}},
            "updates": {"kafka": kafka},
        }
    ).settings
    metrics, valid = Metrics(), expiry(certificate)
    publish_expiry(metrics, settings)
    read_again = {
        ("server.grpc.tls.certificate_file",),
        ("server.grpc.admin.tls.certificate_file",),
        ("lookup.tls.certificate_file",),
    }
    of_clients = {
        ("lookup.tls.ca_file",): valid,
        ("tiers.redis.tls.ca",): valid,
        ("tiers.redis.tls.certificate",): OLD_S,
        ("updates.kafka.options.ssl.ca.location",): valid,
    }

    def reported():
        return metrics.numbers()[m.CERTIFICATE_EXPIRY]

    assert reported() == dict.fromkeys(read_again, OLD_S) | of_clients
    for each in (port, client):
        each.write_text(certificate.read_text())
    assert reported() == dict.fromkeys(read_again, valid) | of_clients
    port.unlink()
    assert reported() == of_clients
