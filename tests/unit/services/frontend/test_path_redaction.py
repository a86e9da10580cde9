"""Redaction of the server's paths in messages for clients."""

from __future__ import annotations

import pytest

from hps.config import as_configuration
from hps.errors import BadRequest, ModelError, TierError, TierTimeout, Unavailable
from services.frontend import path_redaction as server_paths
from services.frontend.errors import client_error, http_status


@pytest.fixture(autouse=True)
def hidden(monkeypatch):
    monkeypatch.setattr(server_paths, "_names", {})
    monkeypatch.setattr(server_paths, "_pattern", server_paths._pattern)
    settings = {"models": {"repository": "/srv/models"}, "tiers": {"rocksdb": {"path": "/srv"}}}
    server_paths.hide_paths(as_configuration(settings).settings)


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("/srv/models/a/1: no", "models.repository/a/1: no"),
        (
            "at '/srv/models', '/srv/models2' and /srv",
            "at 'models.repository', 'tiers.rocksdb.path/models2' and tiers.rocksdb.path",
        ),
        ("POST /v2/srv/models is not offered", "POST /v2/srv/models is not offered"),
        ("in /dev/shm", "in /dev/shm"),
    ],
)
def test_paths_are_replaced_by_the_names_of_their_settings(message, shown):
    assert str(client_error(Unavailable(message), "")) == shown


def test_redacted_error_keeps_its_type_and_attributes():
    error = client_error(TierTimeout("rocksdb", "/srv/1.sst"), "")
    assert (type(error), str(error), error.tier) == (
        TierTimeout,
        "rocksdb: tiers.rocksdb.path/1.sst",
        "rocksdb",
    )
    assert isinstance(client_error(TierError("rocksdb", "/srv"), ""), TierError)
    assert http_status(client_error(ModelError("/srv/models"), "")) == 409


def test_text_of_clients_is_not_redacted():
    assert (
        str(client_error(BadRequest("no feature '/srv/models'"), "")) == "no feature '/srv/models'"
    )
