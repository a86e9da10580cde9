"""Tables of ``docs/metrics.md``, from the metric table; `hps.tools.docs_tables` writes the page."""

from __future__ import annotations

from hps.observability.metric_spec import MetricSpec
from hps.observability.metric_table import GROUPS
from hps.observability.metric_triton import TRITON


def metric_tables() -> str:
    """Return all groups of metrics as Markdown, with a heading and a table each."""
    groups = [(f"## {title}", specs) for title, specs in GROUPS.items()]
    groups.append(("## Triton's names", TRITON))
    return "\n\n".join(f"{title}\n\n{_table(specs)}" for title, specs in groups)


def _table(specs: tuple[MetricSpec, ...]) -> str:
    rows = ["| Metric | Kind | Labels | Meaning |", "|---|---|---|---|"]
    for spec in specs:
        labels = ", ".join(spec.labels)
        rows.append(f"| `{spec.name}` | {spec.kind} | {labels} | {spec.help} |")
    return "\n".join(rows)
