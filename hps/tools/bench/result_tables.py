"""Results of ``hps bench``, and what two of them differ in, for people."""

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

# From here on, of the time at the 99th percentile, requests that are sent late count.
_LATE, _LATE_S = 0.1, 1e-3
# From here on a run says more of unknown keys than of the model's rows.
_MANY_DEFAULTED = 0.1


def show(told: Mapping[str, Any]) -> None:
    """A result for people."""
    way = f"{told['rate']:g} due per s, {told['arrivals']}" if told["rate"] else "closed loop"
    print_line(
        f"{told['model']} at {told['url']} ({told['server']}), batch {told['batch']}, keys {told['keys']}: "
        f"{plural(told['different_requests'], 'request')} in turn, "
        f"{plural(told['different_keys'], 'different key')}"
    )
    lines = f", {plural(told['connections'], 'connection')}" if told["connections"] else ""
    print_line(
        f"{way}, concurrency {told['concurrency']}{lines}, {told['seconds']:.1f} s after "
        f"{told['warmup_s']:g} s of warm-up"
    )
    if told["keys_from"] is not None:
        print_line(f"keys answered from {in_words(told['keys_from'])}")
    print_line()
    failed, done = errors_of(told), told["requests"]
    print_table(
        ("requests", "requests/s", "samples/s", "errors"),
        [
            (
                count(done),
                FormattedNumber(f"{told['requests_per_s']:,.1f}"),
                FormattedNumber(f"{told['samples_per_s']:,.0f}"),
                FormattedNumber(
                    f"{failed:,} ({percentage(failed, failed + done)})" if failed else "0"
                ),
            )
        ],
    )
    print_line()
    columns = [name for name, value in told["latency_s"].items() if value is not None]
    rows = [("latency", *(_ms(told["latency_s"][name]) for name in columns))]
    if told["rate"]:
        rows.append(("sent late by", *(_ms(told["late_s"].get(name)) for name in columns)))
    if columns:
        print_table(("ms", *columns), rows)
    for kind, error in sorted(told["errors"].items(), key=lambda each: -each[1]["count"]):
        print_problem(f"{error['count']:,} {kind}; the first one: {error['first']}")
    if told["interrupted"]:
        warn("interrupted: this is what there was until then")
    _show_limits(told)
    warn_of_defaults((told["keys_from"] or {}).get("default", 0.0))


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
            f"{percentage(part, 1.0)} of the keys have no row, so this measures defaults: "
            "ask for the server's "
            "hottest keys (leave --rows out), for those of --repository DIR, or send --requests FILE of hps "
            "generate requests"
        )


def _show_limits(told: Mapping[str, Any]) -> None:
    """What the load generator itself, and not the server, may have been slow at."""
    if told["own_cpu"] > BUSY:
        warn(
            f"this load generator used {100 * told['own_cpu']:.0f} % of a core and was the limit itself: the "
            "server may be quicker. Larger batches, a lower --rate, or several of it beside each other help"
        )
    if told["found_no_place"]:
        warn(
            f"{plural(told['found_no_place'], 'request')} had to wait until fewer than "
            f"{told['concurrency']} others were under way (--concurrency), which counts as their latency: "
            "the server is slower than --rate"
        )
        return
    late, took = told["late_s"].get("p99"), told["latency_s"].get("p99")
    if told["rate"] and late and late > max(_LATE_S, _LATE * took):
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
    for file, told in ((before_file, before), (after_file, after)):
        if failed := errors_of(told):
            warn(f"{file}: {failed:,} requests failed, of which no time is known")
    found = compare(before, after)
    print_table(
        ("", before_file.name, after_file.name, "change", "between", "verdict"),
        [_shown(each) for each in found],
        styles={"slower": "red", "faster": "green"},
    )
    print_line()
    parts = " and ".join(str(len(slices_of(told))) for told in (before, after))
    print_line(
        f"between: {100 * (1 - LEVEL):.0f} % for all lines together (Bonferroni), by a block bootstrap of "
        f"{parts} slices. none: they tell no difference."
    )
    print_line("What else a machine does may differ by more from run to run: repeat both, in turn.")


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
