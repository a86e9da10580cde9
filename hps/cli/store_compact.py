"""``hps store compact``: fold the updates in RocksDB into a new version of a model."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hps.cli.command_options import argument, option
from hps.cli.options import ReportOptions, SetOption
from hps.cli.store_open import TierName, open_store, read_config
from hps.errors import ConfigError
from hps.tools.output import count, plural, print_line, print_table

if TYPE_CHECKING:
    from hps.config import Configuration

COMPACT_EXAMPLES = """\b
Examples:
  hps store compact ctr --config hps.yaml              # the next version
  hps store compact ctr --config hps.yaml --base 7 --version 12
"""


@dataclass(frozen=True, kw_only=True)
class CompactOptions(ReportOptions):
    model: str = argument()
    """The model."""
    config: Path = option(MISSING, "--config", "-c", metavar="FILE")
    """The node's configuration."""
    overrides: SetOption = None
    base: int | None = option(None, min=1)
    """The version over which rows were written; default: the one that a start makes current."""
    version: int | None = option(None, "--version", "-v", min=1)
    """The new version; default: the next one."""


def compact(options: CompactOptions) -> None:
    """Fold the updates of a version in RocksDB into a new version.

    The version is written to the model repository. It has the stream positions that it contains, so that
    a node which loads it continues from there, and drops the old updates once the old version is not
    needed any more. A node may be running."""
    configuration = read_config(options.config, options.overrides)
    report = compact_model(configuration, options.model, options.base, options.version)
    options.report(report, _show)


def compact_model(
    configuration: Configuration, model: str, base: int | None, version: int | None
) -> dict[str, Any]:
    """Write the version, with progress; returns what was done. Raises ConfigError, ModelError, TierError."""
    from hps.cli.progress import ConsoleProgress
    from hps.models.compaction import compact_version
    from hps.models.repository import Repository
    from hps.node.version_choice import ChoiceFile
    from hps.tiers.mapped import MappedTier

    models = configuration.settings.models
    if not isinstance(models.repository, Path):
        raise ConfigError(
            f"models.repository is {models.repository}; updates are folded into a version of a local one: "
            "copy the version there, name it by --set models.repository=DIR, and publish the result with "
            "hps model publish --to"
        )
    if base is None and (choice := ChoiceFile(configuration.settings).choices().get(model)):
        base = choice.current  # chosen at run time
    override = (models.serve or {}).get(model)
    opened = Repository(models.repository).open(model, base, override)
    with open_store(configuration, TierName.rocksdb) as store:
        tier = store.tier
        assert isinstance(tier, MappedTier)
        folder, tables = compact_version(opened, tier, ConsoleProgress(), version=version)
    return {
        "model": model,
        "version": int(folder.name),
        "base": opened.version,
        "folder": folder,
        "tables": [
            {"name": t.name, "how": t.how, "updates": t.rows, "watermark": t.watermark}
            for t in tables
        ],
    }


def _show(report: dict[str, Any]) -> None:
    rows = [(t["name"], t["how"], count(t["updates"])) for t in report["tables"]]
    print_table(("table", "written as", "updated rows"), rows)
    folded = plural(sum(t["updates"] for t in report["tables"]), "updated row")
    print_line(
        f"Wrote {report['model']}/{report['version']}: version {report['base']} with {folded}, to "
        f"{report['folder']}"
    )
