"""The tables of recorded benchmarks in the documentation are those of benchmarks/results."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "tools"))
try:
    import recorded_figures
finally:
    sys.path.pop(0)


@pytest.mark.parametrize("file", recorded_figures.FILES, ids=lambda file: file.name)
def test_tables_are_as_recorded(file: Path) -> None:
    text = file.read_text()
    assert "<!-- figures: " in text
    assert text == recorded_figures.text_with_figures(text), (
        "run `python tools/recorded_figures.py`"
    )


def test_floor_shows_planned_and_packed_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"dim": 8, "floor B/s": 30.0, "fetch B/s": 16.5, "fetch / floor": 0.55}
    packed = {**row, "fetch / floor": 0.5}
    recorded = {
        "bars": [{"name": "floor_8", "limit": "≥ 0.5", "value": 0.55}],
        "tables": {
            "4 M rows, packed, three quarters full": [packed],
            "4 M rows, all resident, 0.45 rows a slot as planned": [row],
        },
    }
    monkeypatch.setattr(recorded_figures, "recording", lambda _: recorded)
    assert recorded_figures.floor().splitlines()[2] == "| 8 | 30.00 | 16.50 | 0.55 | 0.50 | 0.5 |"


def test_unmeasured_figures_are_dashes(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"predict_{n}_{p}" for n in (1, 64, 1024) for p in ("rest", "grpc")]
    names += [f"p50_{n}" for n in (1, 64, 1024)]
    recorded = {"bars": [{"name": name, "value": None} for name in names]}
    monkeypatch.setattr(recorded_figures, "recording", lambda _: recorded)
    assert recorded_figures.server().splitlines()[2] == "| 1 | – | – | – |"


def test_rates_with_missing_rows_are_those_of_each_share(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {
            "rows on the GPU": share,
            "skew": skew,
            "batch": batch,
            "callers": callers,
            "missing": 0.0512,
            "requests/s": 10_000.0 * share,
            "p99 ms": 1.234,
        }
        for share, skew in ((1.0, 0), (0.3, 3))
        for batch, callers in ((1, 64), (64, 64), (1024, 8))
    ]
    tables = {"REST predictions with rows missing on the GPU": rows}
    monkeypatch.setattr(recorded_figures, "recording", lambda _: {"tables": tables})
    lines = recorded_figures.incomplete().splitlines()
    rate = "3,000 (1.23 ms)"
    assert lines[3] == f"| 30% | mostly of a third of the rows | 5% | {rate} | {rate} | {rate} |"
    monkeypatch.setattr(recorded_figures, "recording", lambda _: {"tables": {}})
    assert recorded_figures.incomplete() == "Not recorded yet.\n"
