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
