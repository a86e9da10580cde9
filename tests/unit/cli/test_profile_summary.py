"""Summary of several requests' profiles."""

from __future__ import annotations

from typing import Any

import pytest

from hps.cli.profile_summary import account


def part(name: str, us: float | None, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "us": us, "about": {"model": "m"}, "parts": list(parts)}


def test_means_of_parts_add_up_to_the_whole() -> None:
    first = part("r", 100.0, part("parse", 10.0), part("lookup", 80.0, part("cpu", 30.0)))
    second = part("r", 50.0, part("parse", 10.0), part("lookup", 20.0, part("redis", 5.0)))
    summary = account([first, second])
    assert (summary["requests"], summary["mean_us"], summary["about"]) == (2, 75.0, {"model": "m"})
    rows = {tuple(part["path"]): part for part in summary["parts"]}
    assert list(rows) == [
        ("parse",),
        ("lookup",),
        ("lookup", "cpu"),
        ("lookup", "redis"),
        ("lookup", "rest"),
        ("rest",),
    ]
    assert {path: row["mean_us"] for path, row in rows.items()} == {
        ("parse",): 10.0,
        ("lookup",): 50.0,
        ("lookup", "cpu"): 15.0,
        ("lookup", "redis"): 2.5,
        ("lookup", "rest"): 32.5,
        ("rest",): 15.0,
    }
    assert sum(row["share"] for path, row in rows.items() if len(path) == 1) == pytest.approx(1)
    assert (rows["lookup", "cpu"]["requests"], rows["parse",]["requests"]) == (1, 2)


def test_unfinished_part_counts_zero() -> None:
    summary = account([part("r", 10.0, part("lookup", None))])
    assert [(part["path"], part["mean_us"]) for part in summary["parts"]] == [
        (["lookup"], 0.0),
        (["rest"], 10.0),
    ]
