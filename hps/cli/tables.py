"""``hps tables``: the embedding tables, their size, and how much of them is cached."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hps.cli.command_options import CommandApp, argument
from hps.cli.options import AdminServer, LocalNode, ReportOptions
from hps.errors import NotFound, Unavailable
from hps.tools.output import FormattedNumber, approximate, count, percentage, print_table, size

app = CommandApp(add_completion=False)

EXAMPLES = """\b
Examples:
  hps tables
  hps tables ctr --output json
  hps tables --config config.yaml
"""


@dataclass(frozen=True, kw_only=True)
class TablesOptions(ReportOptions):
    model: str | None = argument(None)
    """Only this model's tables."""
    admin: AdminServer
    local: LocalNode


@app.command(epilog=EXAMPLES)
def tables(options: TablesOptions) -> None:
    """List the tables of a server (or of --config): rows, bytes, and how much is cached.

    ~ marks approximate numbers: once a table has been written to, RocksDB counts added rows only after
    they are compacted. Tombstones count as rows, also in Redis."""
    with options.local.open() or options.admin.open() as target:
        status = target.status()
    if "models" not in status:
        raise Unavailable("the server is still loading its tables; hps status shows its progress")
    known = [entry["name"] for entry in status["models"]]
    if options.model is not None and options.model not in known:
        raise NotFound(
            f"no model {options.model!r} is served; there is {', '.join(known) or 'none'}"
        )
    rows = [row for row in flatten(status) if options.model in (None, row["model"])]
    options.report(rows, show)


def flatten(status: dict[str, Any]) -> list[dict[str, Any]]:
    """Convert a node's status to one entry per table: rows and bytes in the store, cached rows.

    ``shared``: rows and bytes in each shared tier."""
    from hps.row_format import row_format

    shared = [tier["name"] for tier in status["tiers"] if tier.get("shared")]
    kinds = {t["name"]: t["kind"] for t in status["tiers"] if t["name"] not in shared}
    found = []
    for model in status["models"]:
        for table in model["tables"]:
            held = table["rows"]
            stored = [rows for tier, rows in held.items() if kinds.get(tier) == "store"]
            rows = max(stored or held.values(), default=0)
            about = any(held.get(tier) == rows for tier in table.get("rows_approximate", ()))
            cached = sum(n for tier, n in held.items() if kinds.get(tier) == "cache")
            stored_as = table.get("row_format", table["dtype"])
            found.append(
                {
                    "model": model["name"],
                    "version": model["version"],
                    "table": table["name"],
                    "dim": table["dim"],
                    "dtype": table["dtype"],
                    "row_format": stored_as,
                    "rows": rows,
                    "rows_approximate": about,
                    "bytes": rows * row_format(stored_as).row_bytes(table["dim"]),
                    "cached_rows": cached,
                    "rows_by_tier": held,
                    "shared": {
                        tier: {
                            "rows": held.get(tier),
                            "rows_approximate": tier in table.get("rows_approximate", ()),
                            "bytes": table.get("bytes", {}).get(tier),
                        }
                        for tier in shared
                    },
                    "miss_policy": table["miss_policy"],
                }
            )
    return found


def show(rows: list[dict[str, Any]]) -> None:
    shared = list(rows[0]["shared"]) if rows else []
    print_table(
        (
            *("model", "version", "table", "dim", "row format", "rows", "bytes", "cached"),
            *(f"in {tier}" for tier in shared),
            "on a miss",
        ),
        [
            (
                row["model"],
                FormattedNumber(row["version"]),
                row["table"],
                FormattedNumber(row["dim"]),
                row["row_format"],
                count(row["rows"], about=row["rows_approximate"]),
                approximate(size(row["bytes"]), about=row["rows_approximate"]),
                approximate(
                    percentage(row["cached_rows"], row["rows"]), about=row["rows_approximate"]
                ),
                *(_held(row["shared"][tier]) for tier in shared),
                row["miss_policy"],
            )
            for row in rows
        ],
        optional=("row format", "on a miss", "bytes", "version"),
    )


def _held(found: dict[str, Any]) -> FormattedNumber:
    """Rows of a table in a shared tier, and their memory there if known."""
    if found["rows"] is None:
        return FormattedNumber("-")
    taken = "" if found["bytes"] is None else f" ({size(found['bytes'])})"
    return FormattedNumber(f"{count(found['rows'], about=found['rows_approximate'])}{taken}")
