"""``hps status``: the state of a server."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from hps.cli.command_options import CommandApp
from hps.cli.options import AdminServer, ReportOptions
from hps.tools.output import (
    FormattedNumber,
    age,
    count,
    percentage,
    plural,
    print_line,
    print_table,
    size,
    warn,
)

if TYPE_CHECKING:
    from hps.client.admin import MetricSample

app = CommandApp(add_completion=False)

EXAMPLES = """\b
Examples:
  hps status
  hps status --server http://127.0.0.1:8002 --output json
"""


@app.command(epilog=EXAMPLES)
def status(admin: AdminServer, options: ReportOptions) -> None:
    """Show a server's state: models, tiers, sources of its answers, latencies, updates."""
    with admin.open() as client:
        report = client.status()
        samples = client.metrics()
    report["keys_by_tier"] = keys_by_tier(samples)
    answered = requests(samples)
    report["dead_letters"] = dead_letters(samples)
    report["requests"] = [each for each in answered if each["model"]]
    report["unknown_model_requests"] = sum(r["requests"] for r in answered if not r["model"])
    options.report(report, _show)


def keys_by_tier(samples: Iterable[MetricSample]) -> dict[str, int]:
    """Keys answered since the start, by the tier that had the row; ``default``: no tier had it."""
    counted: dict[str, int] = {}
    for sample in samples:
        if sample.name == "hps_lookup_keys_total":
            tier = sample.labels["tier"]
            counted[tier] = counted.get(tier, 0) + int(sample.value)
    return counted


def dead_letters(samples: Iterable[MetricSample]) -> dict[str, int]:
    """Dead letters since the start, by reason."""
    return {
        sample.labels["reason"]: int(sample.value)
        for sample in samples
        if sample.name == "hps_update_dead_letters_total" and sample.value
    }


def requests(samples: Iterable[MetricSample]) -> list[dict[str, Any]]:
    """Requests per model and method: their number, and median and 99th percentile of the time.

    The model is empty for requests that name no served model. Times are upper bounds of histogram
    buckets, in seconds."""
    buckets: dict[tuple[str, str], dict[float, float]] = {}
    for sample in samples:
        if sample.name == "hps_request_duration_seconds_bucket":
            key = sample.labels["model"], sample.labels["method"]
            bound = float(sample.labels["le"])
            counts = buckets.setdefault(key, {})
            counts[bound] = counts.get(bound, 0) + sample.value
    return [
        {
            "model": model,
            "method": method,
            "requests": int(max(counts.values())),
            "p50_s": _quantile(counts, 0.5),
            "p99_s": _quantile(counts, 0.99),
        }
        for (model, method), counts in buckets.items()
        if max(counts.values()) > 0
    ]


def _quantile(counts: dict[float, float], part: float) -> float | None:
    """Smallest bucket bound below which ``part`` of the observations are; None: above all bounds."""
    total = max(counts.values())
    for bound in sorted(counts):
        if counts[bound] >= part * total:
            return None if bound == float("inf") else bound
    return None


def _show(report: dict[str, Any]) -> None:
    if "models" not in report:
        _show_loading(report)
        return
    print_line(
        f"hps {report['version']}, {report.get('phase', '')}, up for {age(report['uptime_s'])}"
    )
    _show_processes(report)
    _show_models(report["models"])
    print_line()
    _show_tiers(report)
    _show_updates(report)
    _show_requests(report)
    for warning in report.get("warnings", []):
        warn(warning)


def _show_models(models: list[dict[str, Any]]) -> None:
    print_line()
    print_table(
        ("model", "version", "names", "answers", "tables", "features"),
        [
            (
                model["name"],
                FormattedNumber(model["version"]),
                ", ".join(_names(model)),
                _answers(model),
                count(len(model["tables"])),
                count(len(model.get("features", ()))),
            )
            for model in models
        ],
    )


def _names(model: dict[str, Any]) -> list[str]:
    """Names by which requests get this version."""
    return [*(["current"] if model.get("current", True) else []), *model.get("labels", ())]


def _show_requests(report: dict[str, Any]) -> None:
    if report["requests"]:
        print_line()
        print_table(
            ("model", "method", "requests", "p50 below", "p99 below"),
            [
                (
                    r["model"],
                    r["method"],
                    count(r["requests"]),
                    _time(r["p50_s"]),
                    _time(r["p99_s"]),
                )
                for r in report["requests"]
            ],
        )
    if unknown := report["unknown_model_requests"]:
        print_line()
        print_line(f"{plural(unknown, 'request')} rejected: no such model.")


def _show_processes(report: dict[str, Any]) -> None:
    """Print the processes if there are several."""
    processes = report.get("processes", [])
    if len(processes) < 2:
        return
    print_line()
    print_table(
        ("process", "pid", "state", "replaced"),
        [
            (
                f"{p['role']} {p['number']}" if "number" in p else p["role"],
                FormattedNumber(p["pid"] or "-"),
                p["state"],
                count(p["restarts"]) if "restarts" in p else "",
            )
            for p in processes
        ],
        styles={"starting": "yellow", "stopping": "yellow"},
    )


def _answers(model: dict[str, Any]) -> str:
    if "features" not in model:
        return "nothing: hps ingest"
    return "scores" if model["dense"] else "vectors"


def _show_tiers(report: dict[str, Any]) -> None:
    answered = report["keys_by_tier"]
    total = sum(answered.values())
    tiers = {tier["name"]: tier for tier in report.get("tiers", [])}
    names = [*tiers, *(name for name in answered if name not in tiers)]
    rows = []
    for name in names:
        tier, keys = tiers.get(name, {}), answered.get(name, 0)
        kind = "shared" if tier.get("shared") else tier.get("kind", "")
        facts = kind, tier.get("circuit", "")
        rows.append((name, *facts, count(keys), percentage(keys, total)))
    columns = ("tier", "kind", "circuit", "keys answered", "share")
    print_table(columns, rows, styles={"open": "red", "half-open": "yellow"})
    for name, tier in tiers.items():
        if shared := tier.get("shared_memory"):
            taken = f"{shared['path']}, {size(shared['bytes'])}"
            print_line(
                f"{name} shared: {taken}, owner {shared['owner']}, {count(shared['readers'])} readers"
            )
        _show_scheduler(tier.get("scheduler", {}))
        if tier.get("problem"):
            warn(f"{name} does not answer: {tier['problem']}")


def _show_scheduler(models: dict[str, dict[str, float]]) -> None:
    """Print the work of the GPU's batch scheduler, per model version that it runs."""
    if not models:
        return
    print_line()
    print_table(
        ("GPU batches", "requests", "batches", "samples per batch", "incomplete", "slow", "failed"),
        [
            (
                name,
                count(int(each["requests"])),
                count(int(each["batches"])),
                FormattedNumber(f"{each['samples'] / max(each['batches'], 1):.1f}"),
                *(count(int(each[kind])) for kind in ("incomplete", "slow", "failed")),
            )
            for name, each in models.items()
        ],
    )


def _show_updates(report: dict[str, Any]) -> None:
    """Print the readers of update streams, their problems, and dead letters."""
    streams = report.get("updates", [])
    if streams:
        print_line()
        print_table(
            ("updates", "state", "messages behind", "oldest wait"),
            [
                (
                    each["group"],
                    each["state"],
                    count(each["lag"]),
                    age(max((table["age_s"] for table in each["tables"]), default=0)),
                )
                for each in streams
            ],
            styles={"paused": "yellow", "starting": "yellow"},
        )
    for each in streams:
        if each["problem"]:
            warn(f"updates of {each['group']} wait: {each['problem']}")
    if dead := report["dead_letters"]:
        reasons = ", ".join(f"{count(number)} {reason}" for reason, number in sorted(dead.items()))
        found = plural(sum(dead.values()), "update message")
        warn(f"{found} became dead letters since the start: {reasons}; see hps updates dlq")


def _show_loading(report: dict[str, Any]) -> None:
    """Print the state of a server that is still loading."""
    print_line(
        f"Not ready ({report.get('phase', 'unknown')}), up for {age(report.get('uptime_s', 0))}"
    )
    for task in report.get("loading", []):
        done, total = task["done"], task["total"]
        amount = f"{count(done)} of {count(total)} {task['unit']}"
        print_line(f"{task['title']}: {amount}, {percentage(done, total)}")


def _time(seconds: float | None) -> FormattedNumber:
    return FormattedNumber("-" if seconds is None else f"{1000 * seconds:g} ms")
