"""``hps tables``: the embedding tables, where their rows are and how much they take."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from hps.cli.output import Number, Output, OutputFormat, count, print_json, print_table, share, size
from hps.cli.targets import (
    ADMIN,
    AdminOption,
    ApiKeyOption,
    ConfigOption,
    NoServerOption,
    SetOption,
    open_here,
    refuse_overrides,
)
from hps.errors import NotFound, Unavailable

app = typer.Typer(add_completion=False)

EXAMPLES = """\b
Examples:
  hps tables
  hps tables ctr --output json
  hps tables --config config.yaml
"""
ITEM_BYTES = {"float32": 4, "float16": 2}


@app.command(epilog=EXAMPLES)
def tables(
    model: Annotated[str | None, typer.Argument(help="Only this model's tables.")] = None,
    admin: AdminOption = ADMIN,
    _server: NoServerOption = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    api_key: ApiKeyOption = None,
    output: Output = OutputFormat.table,
) -> None:
    """List the tables of a server (or of --config): rows, bytes, and how much is cached."""
    if config is not None:
        with open_here(config, overrides) as node:
            status = node.status()
    else:
        refuse_overrides(overrides)
        from hps.client import Client

        with Client(admin_url=admin, api_key=api_key) as client:
            status = client.status()
    if "models" not in status:
        raise Unavailable("the server is still loading its tables; hps status tells how far it is")
    known = [entry["name"] for entry in status["models"]]
    if model is not None and model not in known:
        raise NotFound(f"no model {model!r} is served; there is {', '.join(known) or 'none'}")
    rows = [row for row in flatten(status) if model in (None, row["model"])]
    if output is OutputFormat.json:
        print_json(rows)
    else:
        show(rows)


def flatten(status: dict[str, Any]) -> list[dict[str, Any]]:
    """One entry per table, from a node's status: rows and bytes in the store, rows in the cache."""
    kinds = {tier["name"]: tier["kind"] for tier in status["tiers"]}
    found = []
    for model in status["models"]:
        for table in model["tables"]:
            held = table["rows"]
            stored = [rows for tier, rows in held.items() if kinds.get(tier) == "store"]
            rows = max(stored or held.values(), default=0)
            cached = sum(n for tier, n in held.items() if kinds.get(tier) == "cache")
            found.append(
                {
                    "model": model["name"],
                    "version": model["version"],
                    "table": table["name"],
                    "dim": table["dim"],
                    "dtype": table["dtype"],
                    "rows": rows,
                    "bytes": rows * table["dim"] * ITEM_BYTES.get(table["dtype"], 4),
                    "cached_rows": cached,
                    "rows_by_tier": held,
                    "miss_policy": table["miss_policy"],
                }
            )
    return found


def show(rows: list[dict[str, Any]]) -> None:
    print_table(
        ("model", "version", "table", "dim", "dtype", "rows", "vectors", "cached", "on a miss"),
        [
            (
                row["model"],
                Number(row["version"]),
                row["table"],
                Number(row["dim"]),
                row["dtype"],
                count(row["rows"]),
                size(row["bytes"]),
                share(row["cached_rows"], row["rows"]),
                row["miss_policy"],
            )
            for row in rows
        ],
    )
