"""The screen of ``hps top``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hps.tools.output import FormattedNumber, age, number, table_of


def _rate(value: float) -> FormattedNumber:
    return number(value, "{:,.1f}" if 0 < value < 100 else "{:,.0f}")


def _whole(value: float | None) -> FormattedNumber:
    return number(value, "{:,.0f}")


def _seconds(value: float | None) -> FormattedNumber:
    return number(value, "{:.1f} s")


def _share(value: float | None) -> FormattedNumber:
    return number(None if value is None else 100 * value, "{:.1f} %")


def _ms(seconds: float | None) -> FormattedNumber:
    if seconds is not None and math.isinf(seconds):
        return FormattedNumber("> all")
    return number(None if seconds is None else 1000 * seconds, "{:.3g}")


Column = tuple[str, str, Callable[[Any], Any]]
"""A column's title, its key in a summary, and the form of its values."""

_REQUESTS: tuple[Column, ...] = (
    ("req/s", "requests_per_s", _rate),
    ("err/s", "errors_per_s", _rate),
)
_TIMES: tuple[Column, ...] = (("p50 ms", "p50_s", _ms), ("p99 ms", "p99_s", _ms))
_SERVER: tuple[Column, ...] = (
    ("server", "server", str),
    ("state", "state", str),
    ("up for", "uptime_s", age),
    *_REQUESTS,
    ("refused/s", "refused_per_s", _rate),
    *_TIMES,
    ("running", "running", _whole),
    ("queued", "queued", _whole),
    ("keys/s", "keys_per_s", _rate),
    ("default", "defaulted", _share),
    ("degraded/s", "degraded_per_s", _rate),
    ("update age", "age_s", _seconds),
    ("lag", "lag_messages", _whole),
)
_MODEL: tuple[Column, ...] = (("model", "model", str), *_REQUESTS, *_TIMES)
_TIER: tuple[Column, ...] = (
    ("tier", "tier", str),
    ("keys/s", "keys_per_s", _rate),
    ("hit rate", "hit_rate", _share),
    *_TIMES,
    ("skipped/s", "skipped_per_s", _rate),
)
_NODE: tuple[Column, ...] = (
    ("lookup node", "address", str),
    ("state", "up", lambda up: "asked" if up else "not asked"),
    *_REQUESTS,
    ("running", "running", _whole),
    ("retries/s", "retries_per_s", _rate),
)
_STYLES = {"ready": "green", "not ready": "yellow", "away": "bold red"}
# Columns to leave out on a narrow terminal, in this order.
_LEFT_OUT = (
    *("degraded/s", "keys/s", "up for", "running", "lag", "skipped/s", "retries/s", "default"),
    *("refused/s", "p50 ms", "update age", "queued"),
)


def screen(servers: Sequence[Mapping[str, Any]]) -> Any:
    """Build the screen from the summaries of ``servers``, as wide as the terminal.

    A summary is that of `hps.cli.metric_rates.account`, with the server's address and state."""
    from rich.console import Group
    from rich.text import Text

    problems = (f"{each['server']}: {each['problem']}" for each in servers if each["problem"])
    parts: list[Any] = [
        table_of(
            _titles(_SERVER),
            [_cells(_SERVER, each) for each in servers],
            styles=_STYLES,
            optional=_LEFT_OUT,
        ),
        *(Text(problem, "red") for problem in problems),
    ]
    for columns, rows in _parts([each for each in servers if each["state"] != "away"]):
        if len(servers) > 1:
            columns = (*columns, ("server", "server", str))
        cells = [_cells(columns, row) for row in rows]
        parts += [Text(), table_of(_titles(columns), cells, optional=_LEFT_OUT)]
    return Group(*parts)


def _parts(
    servers: Sequence[Mapping[str, Any]],
) -> Iterator[tuple[tuple[Column, ...], list[dict[str, Any]]]]:
    """Columns and rows of the tables of models, tiers and lookup nodes."""

    def rows(part: str) -> list[dict[str, Any]]:
        return [{**row, "server": each["server"]} for each in servers for row in each[part]]

    yield _MODEL, [row for row in rows("models") if row["requests_per_s"]]
    yield _TIER, rows("tiers")
    if nodes := rows("lookup_nodes"):
        yield _NODE, nodes


def _titles(columns: Sequence[Column]) -> list[str]:
    return [title for title, _, _ in columns]


def _cells(columns: Sequence[Column], row: Mapping[str, Any]) -> list[Any]:
    """The row's cells; those of an unreachable server are empty."""
    return [form(row[key]) if key in row else FormattedNumber("") for _, key, form in columns]
