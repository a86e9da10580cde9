"""Connections of a port, within what files may be open."""

from __future__ import annotations

import logging
import resource

import pytest

from services.frontend.connection_limit import ConnectionLimit, most_connections

INFINITE = resource.RLIM_INFINITY


def test_a_client_has_half_of_them() -> None:
    there = ConnectionLimit(4)
    assert [there.enter("a") for _ in range(3)] == [True, True, False]
    assert [there.enter(client) for client in "bcd"] == [True, True, False]
    there.leave("a")
    assert [there.enter(client) for client in "dd"] == [True, False]


def test_of_few_too() -> None:
    there = ConnectionLimit(1)
    assert [there.enter("a") for _ in range(2)] == [True, False]


def test_it_is_told_from_time_to_time(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "hps.frontend")
    there = ConnectionLimit(1)
    for _ in range(5):
        there.enter("1.2.3.4")
    (told,) = caplog.messages
    assert "ulimit -n" in told
    assert "client=1.2.3.4 open=1" in told


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
def test_the_limit_of_open_files_is_raised(
    limits: tuple[int, int], raised: int | None, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_to: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, given: set_to.append(given))
    assert most_connections() == most
    assert set_to == ([] if raised is None else [(raised, limits[1])])
