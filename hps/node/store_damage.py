"""Text about damaged files of a node's own store, with the remedy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hps.tiers.mapped import MappedFileTier, MappedTier


def damage_text(rocksdb: MappedTier | None, mapped: MappedFileTier | None) -> str:
    """Known damage of the node's own store, one of both, and the remedy; empty if none."""
    if mapped is not None and (damaged := mapped.damage.tables()):
        return (
            f"damaged mapped files: {_listed(damaged)}; their rows are answered with the default. Import "
            "the versions again"
        )
    if rocksdb is None or not (damaged := rocksdb.damage.tables()):
        return ""
    in_mapped_files = rocksdb.damaged_files()
    own = {file: table for file, table in damaged.items() if file not in in_mapped_files}
    texts = []
    if own:
        texts.append(
            f"rocksdb: damaged table files: {_listed(own)}; their rows are answered with the default. "
            "Stop the node and run `hps store verify --repair`"
        )
    if in_mapped_files:
        texts.append(
            f"damaged mapped files: {_listed(in_mapped_files)}; their rows are answered with the default. "
            "Remove them and start the node again, which then loads the tables into RocksDB"
        )
    return "; ".join(texts)


def _listed(damaged: Mapping[str, str]) -> str:
    return ", ".join(f"{file} of table {table}" for file, table in sorted(damaged.items()))
