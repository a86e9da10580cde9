"""``hps hotkeys``: the hottest keys of the CPU cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hps.cli.command_options import CommandApp, argument, option
from hps.cli.options import AdminServer, ReportOptions
from hps.errors import BadRequest, NotFound
from hps.tools.output import FormattedNumber, print_table, warn

app = CommandApp(add_completion=False)

EXAMPLES = """\b
Examples:
  hps hotkeys
  hps hotkeys ctr ad --limit 100
  hps hotkeys --snapshot hps-data/hot-keys --output json
"""
HIGHEST = 255


@dataclass(frozen=True, kw_only=True)
class HotKeysOptions(ReportOptions):
    model: str | None = argument(None)
    """Only this model's tables."""
    table: str | None = argument(None)
    """Only this table of the model."""
    limit: int = option(20, min=1, max=1000)
    """Number of keys per table."""
    snapshot: Path | None = option(None)
    """Read this snapshot file (tiers.cpu_cache.snapshot.path) instead of asking a server."""
    admin: AdminServer


@app.command(epilog=EXAMPLES)
def hotkeys(options: HotKeysOptions) -> None:
    """List the hottest keys of the CPU cache with their scores, the highest first.

    The cache evicts the rows with the lowest scores; the highest score is 255. With eviction lru, a
    score falls by 64 in the time in which the cache admits as many rows as it holds. With lfu, it is a
    logarithmic count of uses, halved in that time. Keys that are always in use all have the highest
    score. Equal scores are sorted by key."""
    if options.snapshot is not None:
        found = from_snapshot(options.snapshot, options.model, options.table, options.limit)
    else:
        with options.admin.open() as client:
            found = client.hot_keys(options.model, options.table, options.limit)
    options.report(found, _show)


def _show(found: list[dict[str, Any]]) -> None:
    print_table(
        ("model", "table", "key", "score"),
        [
            (entry["model"], entry["table"], FormattedNumber(key), FormattedNumber(score))
            for entry in found
            for key, score in zip(entry["keys"], entry["scores"], strict=True)
        ],
    )
    if tied := [e for e in found if len(e["scores"]) > 1 and min(e["scores"]) == HIGHEST]:
        names = ", ".join(f"{entry['model']}/{entry['table']}" for entry in tied)
        warn(
            f"all keys shown of {names} have the highest score, so their order has no meaning: "
            "`hps hotkeys --help` explains scores; eviction lfu distinguishes more keys"
        )


def from_snapshot(
    path: Path, model: str | None, table: str | None, limit: int
) -> list[dict[str, Any]]:
    """Read hot keys from a snapshot file, in the form of ``Admin.hot_keys``."""
    from hps.updates.hot_key_snapshot import read_hot_keys

    try:
        tables = read_hot_keys(path)
    except OSError as error:
        raise NotFound(f"{path} can't be read: {error.strerror}") from None
    except ValueError as error:
        raise BadRequest(str(error)) from None
    found = []
    for name, (keys, scores) in tables.items():
        of_model, _, of_table = name.split("/")
        if model in (None, of_model) and table in (None, of_table):
            hot = {"keys": keys[:limit].tolist(), "scores": scores[:limit].tolist()}
            found.append({"model": of_model, "table": of_table} | hot)
    if not found:
        raise NotFound(f"{path} has no such table; there is {', '.join(tables) or 'none'}")
    return found
