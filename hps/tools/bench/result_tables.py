"""Tables of the results of ``hps bench``, and of comparisons."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hps.tools.bench.compare import LEVEL, BenchDifference, compare, unlike
from hps.tools.bench.report import BUSY, errors_of, load, slices_of
from hps.tools.output import (
    FormattedNumber,
    count,
    percentage,
    plural,
    print_line,
    print_problem,
    print_table,
    warn,
)

# Requests sent later than this share of the 99th percentile get a warning.
_LATE, _LATE_S = 0.1, 1e-3
# Above this share of unknown keys, a run does not measure the model's rows.
_MANY_DEFAULTED = 0.1


def show(report: Mapping[str, Any]) -> None:
    """Print a report."""
    _show_load(report)
    print_line()
    _show_throughput(report)
    print_line()
    _show_latency(report)
    for kind, error in sorted(report["errors"].items(), key=lambda each: -each[1]["count"]):
        print_problem(f"{error['count']:,} {kind}; the first one: {error['first']}")
    if report["interrupted"]:
        warn("interrupted: these are the results until then")
    _show_limits(report)
    warn_of_defaults((report["keys_from"] or {}).get("default", 0.0))


def _show_load(report: Mapping[str, Any]) -> None:
    load = (
        f"{report['rate']:g} due per s, {report['arrivals']}" if report["rate"] else "closed loop"
    )
    print_line(
        f"{report['model']} at {report['url']} ({report['server']}), batch {report['batch']}, "
        f"keys {report['keys']}: "
        f"{plural(report['different_requests'], 'request')} in turn, "
        f"{plural(report['different_keys'], 'different key')}"
    )
    lines = f", {plural(report['connections'], 'connection')}" if report["connections"] else ""
    print_line(
        f"{load}, concurrency {report['concurrency']}{lines}, {report['seconds']:.1f} s after "
        f"{report['warmup_s']:g} s of warm-up"
    )
    if report["keys_from"] is not None:
        print_line(f"keys answered from {in_words(report['keys_from'])}")


def _show_throughput(report: Mapping[str, Any]) -> None:
    failed, done = errors_of(report), report["requests"]
    print_table(
        ("requests", "requests/s", "samples/s", "errors"),
        [
            (
                count(done),
                FormattedNumber(f"{report['requests_per_s']:,.1f}"),
                FormattedNumber(f"{report['samples_per_s']:,.0f}"),
                FormattedNumber(
                    f"{failed:,} ({percentage(failed, failed + done)})" if failed else "0"
                ),
            )
        ],
    )


def _show_latency(report: Mapping[str, Any]) -> None:
    columns = [name for name, value in report["latency_s"].items() if value is not None]
    rows = [("latency", *(_ms(report["latency_s"][name]) for name in columns))]
    if report["rate"]:
        rows.append(("sent late by", *(_ms(report["late_s"].get(name)) for name in columns)))
    if columns:
        print_table(("ms", *columns), rows)


def in_words(keys_from: Mapping[str, float]) -> str:
    """The shares of the tiers, the largest first."""
    shares = sorted(keys_from.items(), key=lambda each: -each[1])
    return ", ".join(
        f"{'no row (default)' if name == 'default' else name} {percentage(part, 1.0)}"
        for name, part in shares
    )


def warn_of_defaults(part: float) -> None:
    """``part``: the share of keys that had no row."""
    if part > _MANY_DEFAULTED:
        warn(
            f"{percentage(part, 1.0)} of the keys have no row, so this measures defaults: use the server's "
            "hottest keys (omit --rows), those of --repository DIR, or --requests of hps generate requests"
        )


def _show_limits(report: Mapping[str, Any]) -> None:
    """Warn of limits of the load generator itself."""
    if report["own_cpu"] > BUSY:
        warn(
            f"this load generator used {100 * report['own_cpu']:.0f} % of a core and was the limit "
            "itself: the server may be faster. Larger batches, a lower --rate, or several "
            "load generators in parallel help"
        )
    if report["found_no_place"]:
        warn(
            f"{plural(report['found_no_place'], 'request')} had to wait until fewer than "
            f"{report['concurrency']} others were in flight (--concurrency), which counts as their latency: "
            "the server is slower than --rate"
        )
        return
    late, took = report["late_s"].get("p99"), report["latency_s"].get("p99")
    if report["rate"] and late and late > max(_LATE_S, _LATE * took):
        warn(
            f"this load generator sent a request in a hundred {_ms(late)} ms late or later, for want of a "
            "core, which counts as latency: leave it one, or lower --rate"
        )


def _ms(seconds: float | None) -> FormattedNumber:
    return FormattedNumber("" if seconds is None else f"{1000 * seconds:.3f}")


def show_comparison(before_file: Path, after_file: Path) -> None:
    before, after = load(before_file), load(after_file)
    for sentence in unlike(before, after):
        warn(f"the runs are not alike: {sentence}")
    for file, report in ((before_file, before), (after_file, after)):
        if failed := errors_of(report):
            warn(f"{file}: {failed:,} requests failed, of which no time is known")
    found = compare(before, after)
    print_table(
        ("", before_file.name, after_file.name, "change", "between", "verdict"),
        [_shown(each) for each in found],
        styles={"slower": "red", "faster": "green"},
    )
    print_line()
    parts = " and ".join(str(len(slices_of(report))) for report in (before, after))
    print_line(
        f"between: {100 * (1 - LEVEL):.0f} % for all lines together (Bonferroni), by a block bootstrap of "
        f"{parts} slices. none: no significant difference."
    )
    print_line(
        "Other load of a machine may differ by more from run to run: repeat both, alternating."
    )


def _shown(each: BenchDifference) -> tuple[Any, ...]:
    is_time = each.name.startswith("p")
    before, after = (_ms(v) + " ms" if is_time else f"{v:,.1f}" for v in (each.before, each.after))
    change = f"{100 * (each.after / each.before - 1):+.1f} %"
    between = f"{100 * (each.low - 1):+.1f} … {100 * (each.high - 1):+.1f} %"
    return (
        each.name,
        FormattedNumber(before),
        FormattedNumber(after),
        FormattedNumber(change),
        FormattedNumber(between),
        each.verdict,
    )
