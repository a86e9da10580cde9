"""``hps model load | unload | label | switch | rollback | list``: versions that a running server serves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from hps.cli.command_options import argument, option
from hps.cli.options import AdminServer, ReportOptions, open_admin
from hps.tools.output import FormattedNumber, print_line, print_table, warn

# A load lasts as long as the rows take.
_TIMEOUT_S = 24 * 3600.0

LOAD_EXAMPLES = """\b
Examples:
  hps model load ctr                  # the highest version becomes current
  hps model load ctr --version 3
  hps model load ctr --version 4 --beside --label canary
"""
UNLOAD_EXAMPLES = """\b
Examples:
  hps model unload ctr --version 3      # one version: a number or a label
  hps model unload ctr                  # the model
"""
LABEL_EXAMPLES = """\b
Examples:
  hps model label ctr stable 3        # requests for 'stable' get version 3
  hps model label ctr stable canary   # ... the version with this label
  hps model label ctr stable --remove
"""
SWITCH_EXAMPLES = """\b
Examples:
  hps model switch ctr 3         # requests without a version get it
  hps model switch ctr canary
  hps model switch ctr latest    # the highest one; follow newer ones
"""
ROLLBACK_EXAMPLES = """\b
Examples:
  hps model rollback ctr     # back to the version before the last switch
"""
LIST_EXAMPLES = """\b
Examples:
  hps model list
  hps model list ctr --output json
"""


@dataclass(frozen=True, kw_only=True)
class ServedModelOptions(ReportOptions):
    name: str = argument()
    """The model."""
    admin: AdminServer

    def send(self, verb: str, **parameters: Any) -> dict[str, Any]:
        """Send a change of the model to the server; return the answer."""
        given = {name: value for name, value in parameters.items() if value not in (None, [])}
        admin = self.admin
        with open_admin(admin.server, admin.credentials, timeout_s=_TIMEOUT_S) as client:
            path = f"/v2/repository/models/{quote(self.name, safe='')}/{verb}"
            return dict(client.ask(path, {"parameters": given}))

    def done(self, answer: dict[str, Any], text: str) -> None:
        self.report(answer, lambda _answer: print_line(text))
        if warning := answer.get("warning"):
            warn(warning)


@dataclass(frozen=True, kw_only=True)
class LoadOptions(ServedModelOptions):
    version: int | None = option(None, "--version", "-v", min=1)
    """The version; default: the one in the server's settings, else the highest."""
    beside: bool = option(False, "--beside")
    """Keep the current version; serve the loaded one by its number and labels."""
    label: list[str] | None = option(None, "--label")
    """A label for the version; may be repeated."""


def load(options: LoadOptions) -> None:
    """Serve a version, in place of the current one or beside it.

    The current version answers until the new one is ready. It then stays in memory for a rollback
    (models.rollback_s)."""
    answer = options.send(
        "load",
        version=options.version,
        beside=options.beside or None,
        labels=list(options.label or ()),
    )
    how = "served beside the current version" if options.beside else "the current version"
    options.done(answer, f"{options.name} version {answer['version']} is {how}.")


@dataclass(frozen=True, kw_only=True)
class UnloadOptions(ServedModelOptions):
    version: str | None = option(None, "--version", "-v")
    """A served version's number or label; default: the whole model."""


def unload(options: UnloadOptions) -> None:
    """Stop serving a model, or one version of it.

    Requests in flight are answered."""
    answer = options.send("unload", version=options.version)
    what = f" version {options.version}" if options.version else ""
    options.done(answer, f"{options.name}{what} is not served any more.")


@dataclass(frozen=True, kw_only=True)
class LabelOptions(ServedModelOptions):
    label: str = argument()
    """The label, such as stable or canary."""
    version: str | None = argument(None)
    """A served version's number or label."""
    remove: bool = option(False, "--remove")
    """Remove the label; its version stays served until it is unloaded."""


def label(options: LabelOptions) -> None:
    """Give a served version a label, for requests."""
    from hps.errors import BadRequest

    if options.remove == (options.version is not None):
        raise BadRequest("give a version for the label, or --remove")
    answer = options.send("label", label=options.label, version=options.version)
    done = "is removed" if options.remove else f"names version {options.version}"
    options.done(answer, f"{options.name}: label '{options.label}' {done}.")


@dataclass(frozen=True, kw_only=True)
class SwitchOptions(ServedModelOptions):
    version: str = argument()
    """A served version's number or label, or latest."""


def switch(options: SwitchOptions) -> None:
    """Make a served version the current one.

    The current version answers requests without a version."""
    answer = options.send("switch", version=options.version)
    options.done(answer, f"{options.name} version {answer['version']} is the current version.")


def rollback(options: ServedModelOptions) -> None:
    """Make the previous version the current one again.

    It is served immediately if it is still in memory (models.rollback_s), else after a load."""
    answer = options.send("rollback")
    options.done(answer, f"{options.name} version {answer['version']} is the current version.")


@dataclass(frozen=True, kw_only=True)
class ListOptions(ReportOptions):
    name: str | None = argument(None)
    """A model; default: all."""
    admin: AdminServer


def list_(options: ListOptions) -> None:
    """List a server's versions: states and labels."""
    with options.admin.open() as client:
        index = client.ask("/v2/repository/index", {})
    rows = [
        each
        for each in index
        if options.name in (None, each["name"]) and not each["name"].endswith(".lookup")
    ]
    options.report(rows, _show)


def _show(rows: list[dict[str, Any]]) -> None:
    is_served = [each["state"] != "UNAVAILABLE" for each in rows]
    notes = [
        each.get("reason", "") if is_up else "" for each, is_up in zip(rows, is_served, strict=True)
    ]
    shares = [each.get("weight", 0) for each in rows]
    columns = ["model", "version", "state", "current", "labels"]
    # Only where a traffic rule divides the requests, or did.
    columns += ["percent"] * any(share not in (0, 100) for share in shares) + ["note"] * any(notes)
    by_column: list[dict[str, Any]] = [
        {
            "model": each["name"],
            "version": FormattedNumber(each["version"]),
            "state": each["state"].lower(),
            "current": "yes" if each.get("current") else "",
            "labels": ", ".join(each.get("labels", ())),
            "percent": FormattedNumber(f"{share:g}"),
            "note": note,
        }
        for each, share, note in zip(rows, shares, notes, strict=True)
    ]
    by_column.sort(key=lambda row: (row["model"], int(row["version"])))
    print_table(columns, [[row[name] for name in columns] for row in by_column])
