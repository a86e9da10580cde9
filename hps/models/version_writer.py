"""Write versions into a model repository, all or nothing (see `staging`), the manifest last."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hps.config.model_file import dump_model_spec, load_model_spec
from hps.config.model_schema import ModelSpec, TableSpec
from hps.errors import ModelError
from hps.models.checksummed_file import ChecksummedFile
from hps.models.delta_writer import difference, open_delta_base, replace_by_delta
from hps.models.manifest import (
    DENSE_FILE,
    FILE_NAME,
    KEY_FILE,
    TABLES_FOLDER,
    VECTOR_FILE,
    FileEntry,
    Manifest,
    RowConversion,
    TableEntry,
    checksum_file,
    compare_checksum,
    manifest_time,
    write_manifest,
)
from hps.models.mapped_file import MAPPED_FILE, MappedOptions, write_mapped
from hps.models.repository import SPEC_FILE, ModelVersion, check_version_number
from hps.models.staging import (
    clean_leftovers,
    fsync_all,
    fsync_path,
    hidden_folder,
    locked_model,
    make_folder,
    publish_version,
    write_atomically,
)
from hps.models.table_sharing import Base, BaseVersion, find_base, share_equal_tables
from hps.models.tables import open_table
from hps.types import Progress, as_keys

Chunk = tuple[Any, Any]
Source = Chunk | Iterable[Chunk]


# The documented Python API: callers name the few arguments that they need.
def write_version(
    root: Path | str,
    spec: ModelSpec,
    version: int,
    tables: Mapping[str, Source],
    *,
    dense: Path | bytes | None = None,
    metadata: Mapping[str, Any] | None = None,
    watermark: Mapping[str, Mapping[str, int]] | None = None,
    replace: bool = False,
    replace_spec: bool = False,
    mapped: bool = True,
    base: Base = "latest",
    progress: Callable[[int], None] = lambda _rows: None,
) -> Path:
    """Write one version and return its folder. Raises ModelError.

    ``tables``: per table of ``spec`` either ``(keys (n,), vectors (n, dim))`` or an iterable of such
    chunks, which is streamed. ``replace``: an existing version may be replaced. ``replace_spec``: a
    ``model.yaml`` with other contents may be replaced. ``mapped``: also write each table's served form (see
    `mapped_file`). ``base``: the version with which unchanged tables are shared (see `table_sharing`).
    ``progress`` gets the rows of each step."""
    model = Path(root) / spec.name
    _check_contents(spec, tables, dense)
    _check_version(model, spec, version, replace=replace, replace_spec=replace_spec)
    shared = find_base(model, version, base)
    make_folder(model)
    clean_leftovers(model)
    final = model / str(version)
    with hidden_folder(model, version) as folder:
        manifest = Manifest(
            model=spec.name,
            version=version,
            created=manifest_time(),
            tables=_write_tables(folder, spec, tables, progress),
            dense=None if dense is None else write_dense(folder / DENSE_FILE, dense),
            metadata=dict(metadata or {}),
            watermark={topic: dict(offsets) for topic, offsets in (watermark or {}).items()},
        )
        if shared is not None:
            names = _tables_as_before(model, spec)
            manifest = share_equal_tables(folder, manifest, shared, names)
            if mapped:
                manifest = _with_deltas(folder, manifest, shared, spec)
        if mapped:
            manifest = manifest.with_conversions(write_mapped_files(folder, spec, manifest))
        finish_version(folder, manifest)
        with locked_model(model):  # another writer may have made the model meanwhile
            _check_spec(model, spec, replace_spec=replace_spec)
            # A writer that is killed at its last step leaves a version without a ``model.yaml``.
            described = (model / SPEC_FILE).is_file()
            publish_version(folder, final, replace=replace or not described)
            write_spec(model, spec)
    return final


def _with_deltas(
    folder: Path, manifest: Manifest, shared: BaseVersion, spec: ModelSpec
) -> Manifest:
    """Replace tables that differ little from those of ``shared`` by deltas; returns the new manifest."""
    tables = dict(manifest.tables)
    for table in spec.tables:
        entry = tables[table.name]
        if entry.origin is not None or not entry.rows:
            continue
        base = open_delta_base(shared, table)
        where = folder / TABLES_FOLDER / table.name
        files = open_table(where, table.name, table.dim, manifest)
        found = None if base is None else difference(files, base)
        if base is not None and found is not None:
            tables[table.name] = replace_by_delta(where, entry, base, found)
    return manifest.model_copy(update={"tables": tables})


def _tables_as_before(model: Path, spec: ModelSpec) -> list[str]:
    """The tables that the folder's model.yaml, if it has one, describes in the same way."""
    path = model / SPEC_FILE
    before = load_model_spec(path).tables if path.is_file() else spec.tables
    return [table.name for table in spec.tables if table in before]


def finish_version(folder: Path, manifest: Manifest) -> None:
    """Sync the files to the disk, then write the manifest."""
    fsync_all(folder)
    write_manifest(folder / FILE_NAME, manifest)
    fsync_path(folder / FILE_NAME)
    fsync_path(folder)


def _check_contents(
    spec: ModelSpec, tables: Mapping[str, Source], dense: Path | bytes | None
) -> None:
    known = [t.name for t in spec.tables]
    if sorted(known) != sorted(tables):
        raise ModelError(
            f"model '{spec.name}' describes the tables {', '.join(sorted(known))}, "
            f"given are {', '.join(sorted(tables)) or 'none'}"
        )
    if (dense is None) != (spec.dense is None):
        raise ModelError(
            f"model '{spec.name}': "
            + ("a dense part is described, but no file given" if dense is None else
               "a dense file is given, but model.yaml has no `dense:` section")
        )  # fmt: skip


def _check_version(
    model: Path, spec: ModelSpec, version: int, *, replace: bool, replace_spec: bool
) -> None:
    """Raise ModelError unless the version can be written next to those in the folder ``model``."""
    check_version_number(version)
    described = (model / SPEC_FILE).is_file()
    if described and (model / str(version)).exists() and not replace:
        raise ModelError(
            f"{model / str(version)} exists; take another version number, or replace it (--replace)"
        )
    _check_spec(model, spec, replace_spec=replace_spec)


def _check_spec(model: Path, spec: ModelSpec, *, replace_spec: bool) -> None:
    """Raise ModelError if ``model.yaml`` has other contents and may not be replaced."""
    path = model / SPEC_FILE
    if path.is_file() and not replace_spec and load_model_spec(path) != spec:
        raise ModelError(
            f"{path} differs from the description of this version; versions of a model "
            "share it. Adopt it, take another model name, or replace it (--replace-spec)"
        )


def _write_tables(
    folder: Path, spec: ModelSpec, tables: Mapping[str, Source], progress: Callable[[int], None]
) -> dict[str, TableEntry]:
    return {
        t.name: write_table(folder / TABLES_FOLDER / t.name, t, tables[t.name], progress)
        for t in spec.tables
    }


def write_table(
    folder: Path, spec: TableSpec, source: Source, progress: Callable[[int], None]
) -> TableEntry:
    """Write a table's two files into the new ``folder``; see `write_version`. Raises ModelError."""
    folder.mkdir(parents=True)
    rows = 0
    with (
        ChecksummedFile(folder / KEY_FILE) as key_file,
        ChecksummedFile(folder / VECTOR_FILE) as vector_file,
    ):
        for keys, vectors in _chunks(source):
            k, v = _checked(spec, keys, vectors)
            key_file.write(k)
            vector_file.write(v)
            rows += len(k)
            progress(len(k))
    return TableEntry(rows=rows, dim=spec.dim, key=key_file.entry(), emb_vector=vector_file.entry())


def write_mapped_files(
    folder: Path, spec: ModelSpec, manifest: Manifest
) -> dict[str, RowConversion]:
    """Write the mapped file of each table in a version's ``folder`` that has none.

    Returns the errors of the rows, by table, where they are measured. Raises ModelError."""
    found = {}
    for table in spec.tables:
        if (folder / TABLES_FOLDER / table.name / MAPPED_FILE).exists():
            continue  # it is shared
        files = open_table(folder / TABLES_FOLDER / table.name, table.name, table.dim, manifest)
        report = write_mapped(files, files.folder / MAPPED_FILE, MappedOptions.of(table))
        if report.errors is not None:
            found[table.name] = report.errors
    return found


def add_mapped_files(opened: ModelVersion, progress: Progress) -> None:
    """Write the mapped files that a version in a repository misses; its files must match its manifest.

    Each appears complete or not at all; `clean_leftovers` removes what a killed process leaves. Raises
    ModelError, also if the repository cannot be written."""
    absent = [
        (table, pair)
        for table in opened.spec.tables
        for pair in opened.tables[table.name].pairs
        if not (pair.folder / MAPPED_FILE).exists()
    ]
    if not absent:
        return
    model = opened.folder.parent
    if not os.access(model, os.W_OK):
        raise ModelError(
            f"{model} cannot be written, but version {opened.version} misses mapped files, which are "
            "written into it first; make it writable, or publish the version as it is (--no-mapped)"
        )
    clean_leftovers(model)
    with hidden_folder(model, opened.version) as folder:
        for table, pair in absent:
            for path, entry in pair.entries():
                compare_checksum(path, entry.checksum, checksum_file(path))
            with progress.task(f"writing mapped file of {table.name}", pair.rows) as step:
                write_mapped(pair, folder / MAPPED_FILE, MappedOptions.of(table), step)
            target = pair.folder / MAPPED_FILE
            try:
                (folder / MAPPED_FILE).rename(target)
                fsync_path(target.parent)
            except OSError as error:
                raise ModelError(f"cannot write {target}: {error.strerror}") from error


def _chunks(source: Source) -> Iterator[Chunk]:
    if isinstance(source, tuple) and len(source) == 2:
        yield source
    else:
        yield from source


def _checked(spec: TableSpec, keys: Any, vectors: Any) -> tuple[np.ndarray, np.ndarray]:
    try:
        k = as_keys(keys)
    except TypeError as error:
        raise ModelError(f"table '{spec.name}': {error}") from None
    v = np.asarray(vectors)
    if v.dtype.kind not in "fiu":
        raise ModelError(f"table '{spec.name}': vectors of dtype {v.dtype}, expected numbers")
    if k.ndim != 1 or v.ndim != 2 or v.shape[1] != spec.dim:
        raise ModelError(
            f"table '{spec.name}': expected keys (n,) and vectors (n, {spec.dim}), "
            f"found {k.shape} and {v.shape}"
        )
    if len(k) != len(v):
        raise ModelError(f"table '{spec.name}': {len(k)} keys but {len(v)} vectors")
    return k.astype("<i8", copy=False), np.ascontiguousarray(v, "<f4")


def write_dense(path: Path, dense: Path | bytes) -> FileEntry:
    """Write the network's file; returns its manifest entry. Raises ModelError."""
    with ChecksummedFile(path) as out:
        if isinstance(dense, bytes):
            out.write(memoryview(dense))
        else:
            try:
                source = dense.open("rb")
            except OSError as error:
                raise ModelError(f"dense part {dense}: {error.strerror}") from error
            with source:
                while block := source.read(1 << 20):
                    out.write(memoryview(block))
    return out.entry()


def write_spec(model: Path, spec: ModelSpec) -> None:
    """Write ``model.yaml`` atomically, unless its contents are the same already."""
    path = model / SPEC_FILE
    if path.is_file() and load_model_spec(path) == spec:
        return
    write_atomically(path, dump_model_spec(spec))
