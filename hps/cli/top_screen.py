"""What ``hps top`` shows of what servers told."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hps.tools.output import FormattedNumber, age, count, table_of

_STYLES = {"ready": "green", "not ready": "yellow", "away": "bold red"}
_SERVER = (
    *("server", "state", "up for", "req/s", "err/s", "refused/s", "p50 ms", "p99 ms", "running", "queued"),
    *("keys/s", "default", "degraded/s", "update age", "lag"),
)  # fmt: skip
# What a narrow terminal does without, the first one first.
_LEFT_OUT = (
    *("degraded/s", "keys/s", "up for", "running", "lag", "skipped/s", "retries/s", "default"),
    *("refused/s", "p50 ms", "update age", "queued"),
)


def screen(told: Sequence[Mapping[str, Any]]) -> Any:
    """The tables of what servers ``told`` (`hps.cli.metric_rates.account`, with each one's name and
    state), as wide as the terminal."""
    from rich.console import Group
    from rich.text import Text

    there = [each for each in told if each["state"] != "away"]
    several = len(told) > 1

    def part(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Any:
        """Of one server among several, which the last column names."""
        if not several:
            columns, rows = columns[:-1], [row[:-1] for row in rows]
        return table_of(columns, rows, optional=_LEFT_OUT)

    nodes = [(*_node_row(row), each["server"]) for each in there for row in each["lookup_nodes"]]
    parts: list[Any] = [
        table_of(_SERVER, [_server_row(each) for each in told], styles=_STYLES, optional=_LEFT_OUT),
        *(Text(f"{each['server']}: {each['problem']}", "red") for each in told if each["problem"]),
        Text(),
        part(
            ("model", "req/s", "err/s", "p50 ms", "p99 ms", "server"),
            [
                (row["model"], *_requests(row), each["server"])
                for each in there
                for row in each["models"]
                if row["requests_per_s"]
            ],
        ),
        Text(),
        part(
            ("tier", "keys/s", "hit rate", "p50 ms", "p99 ms", "skipped/s", "server"),
            [(*_tier_row(row), each["server"]) for each in there for row in each["tiers"]],
        ),
    ]
    if nodes:
        columns = ("lookup node", "state", "req/s", "err/s", "running", "retries/s", "server")
        parts += [Text(), part(columns, nodes)]
    return Group(*parts)


def _server_row(told: Mapping[str, Any]) -> tuple[Any, ...]:
    if told["state"] == "away":
        return told["server"], told["state"], *[FormattedNumber("")] * 13
    requests, errors, *times = _requests(told)
    return (
        told["server"],
        told["state"],
        age(told["uptime_s"]),
        requests,
        errors,
        _number(told["refused_per_s"]),
        *times,
        count(int(told["running"])),
        count(int(told["queued"])),
        _number(told["keys_per_s"]),
        _share(told["defaulted"]),
        _number(told["degraded_per_s"]),
        FormattedNumber("-" if told["age_s"] is None else f"{told['age_s']:.1f} s"),
        FormattedNumber("-" if told["lag_messages"] is None else f"{told['lag_messages']:,.0f}"),
    )


def _requests(told: Mapping[str, Any]) -> tuple[FormattedNumber, ...]:
    return (
        _number(told["requests_per_s"]),
        _number(told["errors_per_s"]),
        _ms(told["p50_s"]),
        _ms(told["p99_s"]),
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
