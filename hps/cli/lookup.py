"""``hps lookup``: show rows of a table; with ``--explain`` also their tier and age."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from hps.cli.command_options import CommandApp, argument, option
from hps.cli.options import AdminServer, LocalNode, ReportOptions
from hps.cli.value_parsing import as_typed, parse_key, shown_age, shown_vector
from hps.errors import NotFound
from hps.suggestions import hint_for
from hps.tools.output import plural, print_table, warn

if TYPE_CHECKING:
    from hps.client import Admin
    from hps.node.node import Node

app = CommandApp(add_completion=False)

EXAMPLES = """\b
Examples:
  hps lookup ctr user 17 42 --explain
  hps lookup ctr url -9223372036854775808 18446744073709551615 --output json
  hps lookup ctr user 17 --config config.yaml
"""
KEYS_PER_CALL = 200


@dataclass(frozen=True, kw_only=True)
class LookupOptions(ReportOptions):
    model: str = argument()
    """The model."""
    table: str = argument()
    """One of its tables; hps tables lists them."""
    keys: list[str] = argument(metavar="KEY")
    """Keys of the table, from -2^63 to 2^64-1; 0x… is hexadecimal."""
    explain: bool = option(False)
    """Add each row's tier and age."""
    admin: AdminServer
    local: LocalNode


@app.command(epilog=EXAMPLES, context_settings={"ignore_unknown_options": True})
def lookup(options: LookupOptions) -> None:
    """Show rows of a table, fetched as a request would fetch them.

    Keys are those of the table; a feature's key_offset is not added. A key that no tier has is
    shown with the table's default, which is what a request would get."""
    numbers = [parse_key(text) for text in options.keys]
    local = options.local.open()
    if local is not None:
        with local as node:
            report = rows_of_node(node, options.model, options.table, numbers)
    else:
        with options.admin.open() as admin:
            report = rows_of_server(admin, options.model, options.table, numbers)
    for row, text in zip(report["rows"], options.keys, strict=True):
        row["key"] = as_typed(text)
    options.report(report, partial(show, explain=options.explain))


def rows_of_server(admin: Admin, model: str, table: str, keys: list[int]) -> dict[str, Any]:
    """Query a server for the rows, in several calls if the URL would be too long."""
    path = f"/v1/tables/{quote(model, safe='')}/{quote(table, safe='')}/rows?keys="
    report: dict[str, Any] = {}
    for start in range(0, len(keys), KEYS_PER_CALL):
        part = admin.ask(path + ",".join(map(str, keys[start : start + KEYS_PER_CALL])))
        report = part | {"rows": report.get("rows", []) + part["rows"]}
    return report


def rows_of_node(node: Node, model: str, table: str, keys: list[int]) -> dict[str, Any]:
    """Look the rows up in a node of this process; the same report as of a server."""
    import numpy as np

    from hps.lookup.explain import explain_rows

    served = node.model(model)
    if table not in served.tables:
        raise NotFound(f"model {model!r} has no table {table!r}{hint_for(table, served.tables)}")
    wanted = np.array(keys, np.int64)
    found = node.lookup(model, {table: wanted}, by_table=True, want_source=True)
    return explain_rows(served.tables[table], wanted, found)


def show(report: dict[str, Any], explain: bool) -> None:
    columns = ["key", "vector"]
    if explain:
        columns[1:1] = ["from", "age"]
    print_table(
        columns, [_row(row, explain) for row in report["rows"]], styles={"default": "yellow"}
    )
    unknown = sum(not row["found"] for row in report["rows"])
    if unknown:
        number = plural(len(report["rows"]), "key")
        warn(f"{unknown} of {number} unknown: the table's default is shown")
    if report["degraded"]:
        warn(f"looked up without {', '.join(report['degraded'])}, which was unavailable")


def _row(row: dict[str, Any], explain: bool) -> list[Any]:
    cells: list[Any] = [row["key"], shown_vector(row["vector"])]
    if explain:
        cells[1:1] = [row["source"], shown_age(row["version"])]
    return cells
