"""Limit on a port's connections."""

from __future__ import annotations

import logging
import resource

import pytest

from services.frontend.connection_limit import ConnectionLimit, most_connections

INFINITE = resource.RLIM_INFINITY


def test_one_client_gets_half_of_the_connections() -> None:
    limit = ConnectionLimit(4)
    assert [limit.enter("a") for _ in range(3)] == [True, True, False]
    assert [limit.enter(client) for client in "bcd"] == [True, True, False]
    limit.leave("a")
    assert [limit.enter(client) for client in "dd"] == [True, False]


def test_one_client_gets_half_of_few_connections() -> None:
    limit = ConnectionLimit(1)
    assert [limit.enter("a") for _ in range(2)] == [True, False]


def test_refused_connections_are_logged_at_most_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "hps.frontend")
    limit = ConnectionLimit(1)
    for _ in range(5):
        limit.enter("1.2.3.4")
    (reported,) = caplog.messages
    assert "ulimit -n" in reported
    assert "client=1.2.3.4 open=1" in reported


@pytest.mark.parametrize(
    ("limits", "raised", "most"),
    [
        ((1024, 1 << 20), 65_536, 8192),
        ((1024, INFINITE), 65_536, 8192),
        ((1024, 4096), 4096, 512),
        ((4096, 4096), None, 512),
        ((1 << 20, 1 << 20), None, 131_072),
        ((INFINITE, INFINITE), None, 8192),
        ((100, 100), None, 64),
    ],
)
def test_limit_of_open_files_is_raised(
    limits: tuple[int, int], raised: int | None, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_to: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, given: set_to.append(given))
    assert most_connections() == most
    assert set_to == ([] if raised is None else [(raised, limits[1])])
