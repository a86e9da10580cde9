"""``hps lookup``: rows of a table, and with ``--explain`` where they come from and how old they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from hps.cli.output import Number, Output, OutputFormat, age, plural, print_json, print_table, warn
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
from hps.errors import ConfigError, NotFound

if TYPE_CHECKING:
    from hps.node import Node

app = typer.Typer(add_completion=False)

EXAMPLES = """\b
Examples:
  hps lookup ctr user 17 42 --explain
  hps lookup ctr url -9223372036854775808 18446744073709551615 --output json
  hps lookup ctr user 17 --config config.yaml
"""
KEYS_PER_CALL = 200
SHOWN_VALUES = 8
# Rows of files that tell no time have versions far in the past.
DATED_SINCE_MS = 1_000_000_000_000


@app.command(epilog=EXAMPLES, context_settings={"ignore_unknown_options": True})
def lookup(
    model: Annotated[str, typer.Argument(help="The model.")],
    table: Annotated[str, typer.Argument(help="One of its tables; hps tables lists them.")],
    keys: Annotated[
        list[str], typer.Argument(help="Keys of the table, from -2^63 to 2^64-1.", metavar="KEY")
    ],
    explain: Annotated[
        bool, typer.Option("--explain", help="Add the tier each row came from and its age.")
    ] = False,
    admin: AdminOption = ADMIN,
    _server: NoServerOption = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    api_key: ApiKeyOption = None,
    output: Output = OutputFormat.table,
) -> None:
    """Show rows of a table, looked up as a request would look them up.

    Keys are those of the table; a feature's key_offset is not added. A key that no tier has is
    shown with the table's default, which is what a request would get.
    """
    numbers = [parse_key(text) for text in keys]
    if config is not None:
        with open_here(config, overrides) as node:
            report = here(node, model, table, numbers)
    else:
        refuse_overrides(overrides)
        report = asked(admin, api_key, model, table, numbers)
    for row, text in zip(report["rows"], keys, strict=True):
        row["key"] = int(text)
    if output is OutputFormat.json:
        print_json(report)
    else:
        show(report, explain)


def parse_key(text: str) -> int:
    """A key, in decimal or hexadecimal (0x…), as the signed 64-bit number with the same bits; ConfigError
    for anything else."""
    try:
        key = int(text, 16 if "x" in text.lower() else 10)
    except ValueError:
        raise ConfigError(f"{text!r} is not a key, a whole number from -2^63 to 2^64-1") from None
    if not -(2**63) <= key < 2**64:
        raise ConfigError(f"key {text} is outside -2^63 to 2^64-1")
    return key - 2**64 if key >= 2**63 else key


def asked(
    admin: str, api_key: str | None, model: str, table: str, keys: list[int]
) -> dict[str, Any]:
    """The server's account of the rows, in calls that fit an address line."""
    from hps.client import Client

    path = f"/v1/tables/{quote(model, safe='')}/{quote(table, safe='')}/rows?keys="
    report: dict[str, Any] = {}
    with Client(admin_url=admin, api_key=api_key) as client:
        for start in range(0, len(keys), KEYS_PER_CALL):
            part = client.admin(path + ",".join(map(str, keys[start : start + KEYS_PER_CALL])))
            rows = report.get("rows", []) + part["rows"]
            report = part | {"rows": rows}
    return report


def here(node: Node, model: str, table: str, keys: list[int]) -> dict[str, Any]:
    """The same account from a node in this process."""
    import numpy as np

    from hps.lookup.explain import explained

    served = node.model(model)
    if table not in served.tables:
        there = ", ".join(served.tables)
        raise NotFound(f"model {model!r} has no table {table!r}; it has {there}")
    wanted = np.array(keys, np.int64)
    found = node.lookup(model, {table: wanted}, by_table=True, want_source=True)
    return explained(served.tables[table], wanted, found)


def show(report: dict[str, Any], explain: bool) -> None:
    columns = ["key", "vector"]
    if explain:
        columns[1:1] = ["from", "age"]
    print_table(
        columns, [_row(row, explain) for row in report["rows"]], styles={"default": "yellow"}
    )
    unknown = sum(not row["found"] for row in report["rows"])
    if unknown:
        asked = plural(len(report["rows"]), "key")
        warn(f"{unknown} of {asked} unknown: the table's default is shown")
    if report["degraded"]:
        warn(f"looked up without {', '.join(report['degraded'])}, which did not work")


def _row(row: dict[str, Any], explain: bool) -> list[Any]:
    values = [f"{value:.6g}" for value in row["vector"][:SHOWN_VALUES]]
    if len(row["vector"]) > SHOWN_VALUES:
        values.append(f"… ({len(row['vector'])} values)")
    cells: list[Any] = [row["key"], " ".join(values)]
    if explain:
        cells[1:1] = [row["source"], _age(row)]
    return cells


def _age(row: dict[str, Any]) -> Number:
    """The time since the row was written, where its tier keeps versions."""
    if not row["found"]:
        return Number("-")
    from hps.types import version_unix_ms

    dated = version_unix_ms(row["version"]) >= DATED_SINCE_MS
    return age(row["age_s"]) if dated else Number("unknown")
