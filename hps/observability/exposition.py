"""Prometheus' text format."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hps.observability.metric_spec import MetricSpec


def render_metric(
    spec: MetricSpec, found: Mapping[str, Mapping[tuple[str, ...], Any]]
) -> Iterator[str]:
    """Render one metric.

    Not by prometheus_client, which adds ``_total`` to the names of all counters: Triton's have no such
    suffix."""
    yield f"# HELP {spec.name} {spec.help}\n# TYPE {spec.name} {spec.kind}\n"
    for values, value in found.get(spec.name, {}).items():
        labels = sorted(zip(spec.labels, map(_escaped, values), strict=True))
        if spec.kind != "histogram":
            yield _sample(spec.name, labels, value)
            continue
        buckets, total = _cumulative(spec.buckets, *value)
        for bound, count in buckets:
            yield _sample(f"{spec.name}_bucket", sorted([*labels, ("le", bound)]), count)
        yield _sample(f"{spec.name}_count", labels, buckets[-1][1])
        yield _sample(f"{spec.name}_sum", labels, total)


def _sample(name: str, labels: Sequence[tuple[str, str]], number: float) -> str:
    text = ",".join(f'{label}="{value}"' for label, value in labels)
    value = {math.inf: "+Inf", -math.inf: "-Inf"}.get(number) or repr(float(number))
    return f"{name}{{{text}}} {value}\n" if text else f"{name} {value}\n"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _cumulative(
    buckets: tuple[float, ...], counts: list[int], total: float
) -> tuple[list[tuple[str, float]], float]:
    bounds = [str(bound) for bound in buckets] + ["+Inf"]
    running, found = 0, []
    for bound, count in zip(bounds, counts, strict=True):
        running += count
        found.append((bound, float(running)))
    return found, total
