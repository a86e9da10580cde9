"""The screen of ``hps top``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hps.tools.output import FormattedNumber, age, count, table_of

_STYLES = {"ready": "green", "not ready": "yellow", "away": "bold red"}
_SERVER = (
    *("server", "state", "up for", "req/s", "err/s", "refused/s", "p50 ms", "p99 ms", "running", "queued"),
    *("keys/s", "default", "degraded/s", "update age", "lag"),
)  # fmt: skip
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

    rows = [_server_row(each) for each in servers]
    problems = (f"{each['server']}: {each['problem']}" for each in servers if each["problem"])
    parts: list[Any] = [
        table_of(_SERVER, rows, styles=_STYLES, optional=_LEFT_OUT),
        *(Text(problem, "red") for problem in problems),
    ]
    for columns, rows in _parts([each for each in servers if each["state"] != "away"]):
        if len(servers) <= 1:  # without the last column, the server
            columns, rows = columns[:-1], [row[:-1] for row in rows]
        parts += [Text(), table_of(columns, rows, optional=_LEFT_OUT)]
    return Group(*parts)


def _parts(
    servers: Sequence[Mapping[str, Any]],
) -> Iterator[tuple[Sequence[str], list[tuple[Any, ...]]]]:
    """Columns and rows of the tables of models, tiers and lookup nodes."""
    yield (
        ("model", "req/s", "err/s", "p50 ms", "p99 ms", "server"),
        [
            (row["model"], *_requests(row), each["server"])
            for each in servers
            for row in each["models"]
            if row["requests_per_s"]
        ],
    )
    yield (
        ("tier", "keys/s", "hit rate", "p50 ms", "p99 ms", "skipped/s", "server"),
        [(*_tier_row(row), each["server"]) for each in servers for row in each["tiers"]],
    )
    nodes = [(*_node_row(row), each["server"]) for each in servers for row in each["lookup_nodes"]]
    if nodes:
        columns = ("lookup node", "state", "req/s", "err/s", "running", "retries/s", "server")
        yield columns, nodes


def _server_row(server: Mapping[str, Any]) -> tuple[Any, ...]:
    if server["state"] == "away":
        return server["server"], server["state"], *[FormattedNumber("")] * 13
    requests, errors, *times = _requests(server)
    return (
        server["server"],
        server["state"],
        age(server["uptime_s"]),
        requests,
        errors,
        _number(server["refused_per_s"]),
        *times,
        count(int(server["running"])),
        count(int(server["queued"])),
        _number(server["keys_per_s"]),
        _share(server["defaulted"]),
        _number(server["degraded_per_s"]),
        FormattedNumber("-" if server["age_s"] is None else f"{server['age_s']:.1f} s"),
        FormattedNumber(
            "-" if server["lag_messages"] is None else f"{server['lag_messages']:,.0f}"
        ),
    )


def _requests(server: Mapping[str, Any]) -> tuple[FormattedNumber, ...]:
    return (
        _number(server["requests_per_s"]),
        _number(server["errors_per_s"]),
        _ms(server["p50_s"]),
        _ms(server["p99_s"]),
    )


def _tier_row(tier: Mapping[str, Any]) -> tuple[Any, ...]:
    return (
        tier["tier"],
        _number(tier["keys_per_s"]),
        _share(tier["hit_rate"]),
        _ms(tier["p50_s"]),
        _ms(tier["p99_s"]),
        _number(tier["skipped_per_s"]),
    )


def _node_row(node: Mapping[str, Any]) -> tuple[Any, ...]:
    return (
        node["address"],
        "asked" if node["up"] else "not asked",
        _number(node["requests_per_s"]),
        _number(node["errors_per_s"]),
        count(int(node["running"])),
        _number(node["retries_per_s"]),
    )


def _number(value: float) -> FormattedNumber:
    return FormattedNumber(f"{value:,.1f}" if 0 < value < 100 else f"{value:,.0f}")


def _share(value: float | None) -> FormattedNumber:
    return FormattedNumber("-" if value is None else f"{100 * value:.1f} %")


def _ms(seconds: float | None) -> FormattedNumber:
    if seconds is None:
        return FormattedNumber("-")
    return FormattedNumber("> all" if math.isinf(seconds) else f"{1000 * seconds:.3g}")
