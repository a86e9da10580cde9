"""Mapped files for tests: written from rows, and served by a tier."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from hps.models.delta_writer import DeltaBase, difference, write_delta
from hps.models.mapped_file import MAPPED_FILE, MappedOptions, write_mapped
from hps.models.tables import TableFiles, open_table
from hps.native.mapped_format import open_mapped
from hps.tiers.mapped import MappedTier
from hps.tiers.mapped.masked_positions import MASKED_POSITIONS_FILE, read_masked_positions
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
    options = MappedOptions(table.row_format, table.key_bits, threads=1)
    write_mapped(files, target / MAPPED_FILE, options)
    return files


def map_delta_rows(
    tier: MappedTier,
    table: EmbeddingTable,
    folder: Path,
    keys: KeyArray,
    vectors: VectorArray,
    version: int,
) -> Path:
    """As `map_rows`, by a base and a delta: a third of the rows is new, a third of the others changed.

    A few rows of the base are removed. Returns the path of the base."""
    number = np.arange(len(keys))
    in_base = number % 3 != 0
    removed = np.setdiff1d(np.concatenate([keys + 1, keys - 1]), keys)[:5]
    old = vectors + (number % 3 == 1)[:, None].astype(vectors.dtype)
    base_keys = np.concatenate([keys[in_base], removed])
    base_rows = np.concatenate([old[in_base], np.full((len(removed), table.dim), 9, old.dtype)])
    files = write_files(folder / "base", table, base_keys, base_rows)
    whole = write_files(folder / "whole", table, keys, vectors)
    path = files.folder / MAPPED_FILE
    base = DeltaBase(files, open_mapped(path, 0, 0), None)
    found = difference(whole, base, max_share=100.0)
    assert found is not None
    assert len(found.masked) >= len(removed)
    chunk = whole.keys_at(found.rows), whole.vectors_at(found.rows)
    shutil.rmtree(files.folder / "delta", ignore_errors=True)
    write_delta(files.folder, [chunk], base, (found.masked, found.positions))
    delta = files.folder / "delta"
    digest, _ = read_masked_positions(delta / MASKED_POSITIONS_FILE, base.mapped.header)
    load = LoadRecord(digest, len(keys), version, table.dim, table.dtype.name)
    assert tier.map(table, path, load, delta / MAPPED_FILE)
    return path


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
