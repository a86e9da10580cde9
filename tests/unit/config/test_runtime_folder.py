"""Runtime folder and name of the shared cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hps.config import InvalidConfiguration, Settings, configuration_from
from hps.config.runtime_folder import for_workers, with_shared_cache


def settings(**given: Any) -> Settings:
    return configuration_from(given, environ={}).settings


def runtime_and_cache(chosen: Settings) -> tuple[Path | None, str | None]:
    return chosen.server.runtime, chosen.tiers.cpu_cache.shared.name


def test_cache_is_private_without_a_runtime_folder() -> None:
    assert runtime_and_cache(with_shared_cache(settings())) == (None, None)


def test_runtime_folder_shares_the_cache_under_its_own_name() -> None:
    one, other = (
        with_shared_cache(settings(server={"runtime": path})) for path in ("/run/a", "/run/b")
    )
    assert runtime_and_cache(one)[1] != runtime_and_cache(other)[1]
    assert runtime_and_cache(one) == runtime_and_cache(
        with_shared_cache(settings(server={"runtime": "/run/a"}))
    )


def test_given_settings_are_kept() -> None:
    given = {
        "server": {"runtime": "/run/a", "workers": 2},
        "tiers": {"cpu_cache": {"shared": {"name": "mine"}}},
    }
    assert runtime_and_cache(for_workers(settings(**given))) == (Path("/run/a"), "mine")
    off = for_workers(settings(tiers={"cpu_cache": {"enabled": False}}))
    assert off.tiers.cpu_cache.shared.name is None


def test_restarted_node_gets_the_same_folder() -> None:
    """The folder derives from the database, or else from the port: one node at a time owns either."""
    there = {"tiers": {"rocksdb": {"path": "/data/db"}}}
    assert runtime_and_cache(for_workers(settings(**there))) == runtime_and_cache(
        for_workers(settings(**there))
    )
    other_folder = {"tiers": {"rocksdb": {"path": "/data/other"}}}
    assert runtime_and_cache(for_workers(settings(**there))) != runtime_and_cache(
        for_workers(settings(**other_folder))
    )

    def reading(port: int) -> Settings:
        rocksdb = {"path": "/data/db", "access": "read_only"}
        server = {"http": {"port": port}}
        return for_workers(settings(tiers={"rocksdb": rocksdb}, server=server))

    assert runtime_and_cache(reading(9000)) == runtime_and_cache(reading(9000))
    assert runtime_and_cache(reading(9000)) != runtime_and_cache(reading(9003))
    assert runtime_and_cache(reading(0)) != runtime_and_cache(reading(0))


@pytest.mark.parametrize("use", ["auto", "required", "off"])
def test_workers_leave_the_gpu_to_the_node(use: str) -> None:
    chosen = settings(server={"workers": 2}, tiers={"gpu": {"use": use}})
    assert for_workers(chosen).tiers.gpu.use == use


def test_reserved_pages_of_a_shared_cache_are_rejected() -> None:
    with pytest.raises(
        InvalidConfiguration, match=r"huge_pages: is reserved, which can't be shared"
    ):
        settings(server={"workers": 2}, tiers={"cpu_cache": {"huge_pages": "reserved"}})
