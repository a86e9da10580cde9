"""Mapped files for tests: written from rows, and served by a tier."""

from __future__ import annotations

from pathlib import Path

from hps.models.mapped_file import MAPPED_FILE, MappedOptions, write_mapped
from hps.models.tables import TableFiles, open_table
from hps.tiers.mapped import MappedTier
from hps.tiers.rocksdb import LoadRecord
from hps.types import EmbeddingTable, KeyArray, VectorArray


def write_files(
    folder: Path, table: EmbeddingTable, keys: KeyArray, vectors: VectorArray
) -> TableFiles:
    """Write the files of a table to ``folder/<id>``: ``key``, ``emb_vector`` and ``mapped``."""
    target = folder / table.id.replace("/", "+")
    target.mkdir(parents=True, exist_ok=True)
    keys.astype("<i8").tofile(target / "key")
    vectors.astype("<f4").tofile(target / "emb_vector")
    files = open_table(target, table.name, table.dim, None)
    options = MappedOptions(table.dtype, table.key_bits, threads=1)
    write_mapped(files, target / MAPPED_FILE, options)
    return files


def map_rows(
    tier: MappedTier,
    table: EmbeddingTable,
    folder: Path,
    keys: KeyArray,
    vectors: VectorArray,
    version: int,
) -> Path:
    """Serve rows of ``version`` from a mapped file; return its path."""
    files = write_files(folder, table, keys, vectors)
    path = files.folder / MAPPED_FILE
    load = LoadRecord(files.digest, files.rows, version, table.dim, table.dtype.name)
    assert tier.map(table, path, load)
    return path
