"""The server process before it opens anything."""

import logging

import pytest

from hps.config import configuration_from
from services.frontend.main import FrontendServer


@pytest.mark.parametrize(
    ("gpu", "workers", "level"),
    [
        ({"share": 0.5}, 2, logging.WARNING),
        ({}, 2, logging.INFO),
        ({"use": "off"}, 2, None),
        ({"share": 0.5}, 0, None),
    ],
)
def test_workers_without_the_nodes_gpu_cache_are_reported(caplog, monkeypatch, gpu, workers, level):
    monkeypatch.setattr("hps.node.gpu_caches.has_gpu", lambda: False)
    caplog.set_level(logging.INFO, "hps.node.gpu_caches")
    given = {"server": {"workers": workers}, "tiers": {"gpu": gpu}}
    FrontendServer(configuration_from(given, environ={}))
    lines = [each for each in caplog.records if "no GPU cache" in each.message]
    assert [each.levelno for each in lines] == ([] if level is None else [level])
    assert all("server.workers is 2, and workers cannot use" in each.message for each in lines)
