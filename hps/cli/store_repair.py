"""Readability check of RocksDB's files in ``hps store verify``, and its ``--repair``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hps.cli.progress import ConsoleProgress
from hps.cli.store_open import ConfiguredModels, TierName, open_store, work
from hps.errors import ConfigError, TierError
from hps.tools.output import count

if TYPE_CHECKING:
    from hps.config import Configuration
    from hps.rows.tiers import RocksDbRows
    from hps.tiers.rocksdb import SalvagedTable
    from hps.types import EmbeddingTable

Finding = tuple[str, str, str, str]
"""Table, check, result and detail."""

_WRITE_AGAIN = "rows written by API calls must be written again"


def files_of(store: RocksDbRows, table: EmbeddingTable) -> Finding:
    """Check that all rows of a table can be read."""
    from hps.rows.repair import describe_gaps
    from hps.tiers.mapped import MappedTier

    with work():
        gaps = store.tier.gaps(table)
        damaged = store.tier.check_blocks(table) if isinstance(store.tier, MappedTier) else 0
    if damaged:
        text = (
            f"{damaged} parts of its mapped file are damaged; remove the file and start the node, which then "
            "loads the table into RocksDB"
        )
        return table.id, "table files", "FAIL", text
    if not gaps:
        return table.id, "table files", "OK", "all can be read"
    text = f"{describe_gaps(store.tier, table, gaps)}; stop the node and add --repair"
    return table.id, "table files", "FAIL", text


def repaired(
    configuration: Configuration, models: ConfiguredModels, tier: TierName | None
) -> list[Finding]:
    """Repair every damaged table of the database. Raises the errors of opening it."""
    from hps.rows.repair import repair_table
    from hps.rows.tiers import RocksDbRows, placeholder_table, table_name_in

    if tier is TierName.redis:
        raise ConfigError("--repair is for RocksDB; Redis repairs itself, or is loaded again")
    findings: list[Finding] = []
    with open_store(configuration, TierName.rocksdb, writing=True, repair=True) as store, work():
        assert isinstance(store, RocksDbRows)
        lost = store.tier.figures().lost_writes
        if lost:
            text = f"up to {count(lost)} writes are missing; streams are read again, {_WRITE_AGAIN}"
            findings.append(("(all)", "write-ahead log", "WARN", text))
        try:
            store.tier.check_records()
        except TierError as error:
            text = f"the store's own records cannot be repaired: {error}"
            return [*findings, ("(all)", "records", "FAIL", text)]
        configured = {table_name_in(table, store.tier.layout): table for table in models.all()}
        for name in store.tables():
            record = store.record(name)
            table = configured.get(name) or placeholder_table(name, record.dim if record else 1)
            version = models.versions[table.model] if name in configured else None
            saved = repair_table(store.tier, table, version, ConsoleProgress())
            if saved is not None:
                findings.append(
                    (table.id, "repair", *_result(store, table, saved, loaded=bool(version)))
                )
    return findings or [("(all)", "repair", "OK", "nothing was damaged")]


def _result(
    store: RocksDbRows, table: EmbeddingTable, saved: SalvagedTable, *, loaded: bool
) -> tuple[str, str]:
    from hps.rows.repair import describe_gaps

    parts = [f"{count(saved.kept)} rows kept", describe_gaps(store.tier, table, saved.gaps)]
    if loaded:
        parts.append(f"{count(saved.lost)} rows were reset to those of the model's files")
    else:
        parts.append("its model is not configured: rows there are lost")
    if saved.streamed:
        parts.append(
            f"updates of those rows are read again from streams that still have them; {_WRITE_AGAIN}"
        )
    return ("WARN" if saved.streamed or not loaded else "OK"), "; ".join(parts)
