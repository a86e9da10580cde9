"""The machine's clock is set back or forward an hour while a node serves or rows are written."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import hps
from hps.cli.main import app
from hps.tiers.base import FetchContext, Part
from hps.tiers.rocksdb import RocksDbTier
from hps.types import EmbeddingTable, version_now

HOUR = 3600.0
SetClock = Callable[[Callable[[], float]], None]


@pytest.fixture
def set_clock(monkeypatch: pytest.MonkeyPatch) -> SetClock:
    """Offset of the clock in seconds, read at every call."""
    plain = time.time

    def to(ahead: Callable[[], float]) -> None:
        monkeypatch.setattr(time, "time", lambda: plain() + ahead())
        monkeypatch.setattr(time, "time_ns", lambda: int((plain() + ahead()) * 1e9))

    return to


@pytest.fixture
def settings(small_repository: Path, tmp_path: Path) -> dict[str, Any]:
    return {
        "models": {"repository": str(small_repository)},
        "tiers": {
            "rocksdb": {"path": str(tmp_path / "rocksdb")},
            "cpu_cache": {"share": 0.05, "warm": False},
        },
    }


def test_deadlines_ignore_clock_changes(settings: dict[str, Any], set_clock: SetClock) -> None:
    """Every reading of the clock is an hour off the last: code that waits by it gives up, or hangs."""
    jumps = cycle([HOUR, -HOUR])
    set_clock(lambda: next(jumps))
    keys = np.arange(1000)
    with hps.open(settings) as node:
        for _ in range(30):
            found = node.lookup("words", {"words": keys}, by_table=True)
            assert (found.defaulted, found.degraded) == (0, ())
            assert found.vectors["words"][:, 0].tolist() == keys.tolist()


@pytest.mark.parametrize("jump", [HOUR, -HOUR])
def test_a_deletion_stays(tmp_path: Path, jump: float) -> None:
    ahead = [0.0]
    table = EmbeddingTable("m", "t", 1, 1, np.dtype(np.float32), np.zeros(1, np.float32))
    tier = RocksDbTier(tmp_path / "db", clock=lambda: time.time() + ahead[0])
    tier.open_tables([table])
    keys, row = np.array([7]), np.ones((1, 1), np.float32)
    version = np.array([version_now()], np.uint64)
    tier.insert(table, keys, row, version)
    tier.delete(table, keys, version + np.uint64(1))
    ahead[0] = jump
    tier.insert(table, keys, row, version)  # a replay
    part = Part.make(table, keys)
    tier.fetch([part], FetchContext())
    assert part.source.tolist() == [0]
    tier.close()


def test_a_write_by_a_clock_that_was_set_back_is_not_called_done(
    settings: dict[str, Any], set_clock: SetClock, tmp_path: Path
) -> None:
    with hps.open(settings):  # loads
        pass
    config = tmp_path / "config.yaml"
    config.write_text(f"models: {settings['models']}\ntiers: {settings['tiers']}\n")

    def put(value: int, *more: str) -> Any:
        words = ["store", "put", "words", "words", "5", "--vector", ",".join([str(value)] * 8)]
        return CliRunner().invoke(app, [*words, "--config", str(config), *more])

    def held() -> float:
        with hps.open(settings) as node:
            found = node.lookup("words", {"words": np.array([5])}, by_table=True)
            return float(found.vectors["words"][0, 0])

    assert put(1).exit_code == 0
    set_clock(lambda: -HOUR)
    late = put(2)
    assert late.exit_code == 1, late.output
    assert "Written: 0 rows" in late.output
    version = late.stderr.split("--version ")[1].split()[0]
    assert held() == 1
    assert put(2, "--version", version).exit_code == 0
    assert held() == 2
