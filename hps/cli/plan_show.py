"""Show a plan to people: tables of curves, tiers and sizes, and the configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hps.tiers.capacity import slot_bytes
from hps.tools.output import (
    FormattedNumber,
    count,
    number,
    percentage,
    plural,
    print_line,
    print_table,
    size,
    warn,
)

if TYPE_CHECKING:
    from hps.tools.plan.chart import Line
    from hps.tools.plan.planner import Prediction, Prices
    from hps.tools.plan.report import PlanReport

_SHORT_TRACE = 0.5
_UNKNOWN = {
    "the GPU": "Those are lookups on the host; run the command on a machine with the GPU, or give a "
    "--calibration FILE that was saved there",
    "Redis": "Misses are predicted as reads of a local store; run the command where the Redis answers, or "
    "give a --calibration FILE that was saved there",
}
_MOST_LINES = 10


def show(report: PlanReport, prices: Prices) -> None:
    """Print the report."""
    trace = report.trace
    print_line(
        f"{report.model.name}: {plural(trace.requests, 'request')}, {plural(trace.accesses, 'key')}"
    )
    print_line()
    _show_curves(report)
    print_line()
    _show_chosen(report, prices)
    print_line()
    print_line("# for the configuration; models.serve names every model to serve")
    print_line(report.configuration().rstrip())
    _warn(report)


def _show_curves(report: PlanReport) -> None:
    from hps.tools.plan.report import SHARES

    rows = []
    for name, demand in report.demands.items():
        curve = demand.curve
        rates = [percentage(curve.at(round(s * curve.table_rows)), 1) for s in SHARES]
        asked = count(curve.touched_rows, about=curve.sample.rate < 1)
        cached = report.chosen.rows.get(name, 0)
        chosen: tuple[object, ...] = (count(cached), size(cached * slot_bytes(demand.table)))
        if name in report.chosen.in_memory:
            chosen = ("mapped", size(report.files[name]))
        chosen = (*chosen, percentage(report.table_hit_rate(name), 1))
        share = percentage(demand.share, 1)
        rows.append((name, count(curve.table_rows), asked, share, *rates, *chosen))
    titles = [f"{100 * s:g} %" for s in SHARES]
    print_line("Hit rate of a cache with a share of the rows, and the chosen cache:")
    print_table(
        ("table", "rows", "asked for", "of keys", *titles, "cache rows", "bytes", "hit rate"), rows
    )


def _show_chosen(report: PlanReport, prices: Prices) -> None:
    print_table(
        ("tier", "rows", "bytes", "answers"),
        [
            (t["tier"], count(t["rows"]), size(t["bytes"]), percentage(t["answers"], 1))
            for t in report.tiers()
        ],
    )
    print_line()
    caches = [("planned", report.chosen)]
    if report.current is not None:
        caches.append(("configured now", report.current))
    has_mapped = any(found.in_memory for _, found in caches)
    has_gpu = any(found.gpu_bytes for _, found in caches)
    columns = [
        "CPU cache",
        "bytes",
        *(["mapped, in memory"] if has_mapped else []),
        *(["GPU cache", "on GPU"] if has_gpu else []),
        "hit rate",
        "p50",
        "p99",
        "requests/s a core",
        "keys/s a core",
        "cores",
    ]
    if prices.known:
        columns.append("cost an hour")
    columns_of = prices, has_mapped, has_gpu
    print_table(columns, [_prediction(name, each, *columns_of) for name, each in caches])
    for name, found in caches:
        if found.in_memory:
            print_line(
                f"{name}: tables read from mapped files in memory: {', '.join(found.in_memory)}; they need "
                "no CPU cache but for rows that updates change"
            )
        if found.on_gpu:
            print_line(f"{name}: p50 and p99 are of lookups whose vectors stay on the GPU")


def _prediction(
    name: str, found: Prediction, prices: Prices, has_mapped: bool, has_gpu: bool
) -> tuple[object, ...]:
    cost = (number(found.cost, "{:.4f} " + prices.unit),) if prices.known else ()
    return (
        name,
        size(found.bytes),
        *((size(found.mapped_bytes),) if has_mapped else ()),
        *((size(found.gpu_bytes), percentage(found.gpu_hit_rate or 0.0, 1)) if has_gpu else ()),
        percentage(found.hit_rate, 1),
        _milliseconds(found.p50_us),
        _milliseconds(found.p99_us),
        number(found.core_requests_per_s, "{:,.0f}"),
        number(found.core_keys_per_s, "{:,.0f}"),
        count(found.cores),
        *cost,
    )


def _milliseconds(us: float | None) -> FormattedNumber:
    return number(None if us is None else us / 1000, "{:.3g} ms")


def _warn(report: PlanReport) -> None:
    """Warn of what makes the predictions doubtful."""
    for tier, reason in report.unknown_latency.items():
        warn(f"{tier} is not in the predicted latencies: {reason}. {_UNKNOWN[tier]}")
    for name, demand in report.demands.items():
        curve = demand.curve
        if curve.unknown_share > 0.001:
            warn(
                f"{percentage(curve.unknown_share, 1)} of the keys of table {name} have no row; every lookup "
                "of such a key reads the store"
            )
        cached = 0 if name in report.chosen.in_memory else report.chosen.rows.get(name, 0)
        if curve.touched_rows < min(cached, curve.table_rows):
            warn(
                f"the trace asks for {count(curve.touched_rows)} rows of table {name}, fewer than its cache "
                f"of {count(cached)} has; record a longer trace for a better estimate"
            )
    absent = [name for name in report.model.tables if name not in report.demands]
    if absent:
        warn(f"the trace has no keys of {', '.join(absent)}, which get no cache of their own here")


def chart_lines(report: PlanReport) -> list[Line]:
    """The curves to draw: those of the tables with most keys."""
    from hps.tools.plan.chart import Line

    demands = sorted(report.demands.items(), key=lambda item: -item[1].share)[:_MOST_LINES]
    lines = []
    for name, demand in demands:
        each = slot_bytes(demand.table)
        points = [(p.rows * each, p.hit_rate) for p in demand.curve.points if p.rows]
        if name in report.chosen.in_memory:
            chosen = report.files[name], report.table_hit_rate(name)
            lines.append(Line(f"{name}: mapped", points, chosen, mapped=True))
            continue
        rows = report.chosen.rows.get(name, 0)
        lines.append(Line(name, points, (rows * each, demand.curve.at(rows))))
    return lines
