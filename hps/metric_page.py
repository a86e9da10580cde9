"""Writes the tables of ``docs/metrics.md``: ``python -m hps.metric_page docs/metrics.md``."""

from __future__ import annotations

import sys
from pathlib import Path

from hps.metric_table import GROUPS, MetricSpec
from hps.metric_triton import TRITON


def renewed(text: str) -> str:
    """The page with its tables as they are now; what stands before and after them stays."""
    before, begin, rest = text.partition("<!-- begin metrics -->\n")
    _, end, after = rest.partition("<!-- end -->")
    groups = [(f"## {title}", specs) for title, specs in GROUPS.items()]
    groups.append(("## Triton's names", TRITON))
    shown = "\n\n".join(f"{title}\n\n{_table(specs)}" for title, specs in groups)
    return f"{before}{begin}\n{shown}\n\n{end}{after}"


def _table(specs: tuple[MetricSpec, ...]) -> str:
    rows = ["| Metric | Kind | Labels | Meaning |", "|---|---|---|---|"]
    for spec in specs:
        labels = ", ".join(spec.labels)
        rows.append(f"| `{spec.name}` | {spec.kind} | {labels} | {spec.help} |")
    return "\n".join(rows)


def main() -> None:
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(renewed(path.read_text()))


if __name__ == "__main__":
    main()
