"""Writes versions into a model repository, all or nothing.

A version is written to a hidden folder beside its final place, its manifest last, and then renamed; a
reader never sees half of one. The hidden folder is locked while its writer lives, so the leftovers of
a killed writer are recognised and removed by the next one.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from hps.config.model_file import dump_model_spec, load_model_spec
from hps.config.model_schema import ModelSpec, TableSpec
from hps.errors import ModelError
from hps.models.manifest import (
    FILE_NAME,
    FileEntry,
    Manifest,
    TableEntry,
    now,
    write_manifest,
)
from hps.models.repository import DENSE_FILE, SPEC_FILE, TABLES_FOLDER
from hps.models.tables import KEY_FILE, VECTOR_FILE
from hps.types import as_keys

_PREFIX = ".import-"
# A description is written and renamed in far less; an older temporary one was left by a killed writer.
_SPEC_SECONDS = 60.0
_SYNCS = 8
Chunk = tuple[Any, Any]
Source = Chunk | Iterable[Chunk]


def write_version(
    root: Path | str,
    spec: ModelSpec,
    version: int,
    tables: Mapping[str, Source],
    *,
    dense: Path | bytes | None = None,
    metadata: Mapping[str, Any] | None = None,
    watermark: Mapping[str, Any] | None = None,
    replace: bool = False,
    replace_spec: bool = False,
    progress: Callable[[int], None] = lambda _rows: None,
) -> Path:
    """Write one version and return its folder.

    ``tables``: per table of ``spec`` either ``(keys (n,), vectors (n, dim))`` or an iterable of such
    chunks, streamed. ``replace`` allows to replace an existing version, ``replace_spec`` an existing
    ``model.yaml`` that says something else. ``progress`` gets each step's rows. Raises ModelError.
    """
    model = Path(root) / spec.name
    _check_request(model, spec, version, tables, dense, replace=replace, replace_spec=replace_spec)
    # Without a description a version is what a writer left that was killed at its last step.
    described = (model / SPEC_FILE).is_file()
    _make_folder(model)
    clean_leftovers(model)
    with _hidden_folder(model, version) as folder:
        entries = {
            t.name: _write_table(folder / TABLES_FOLDER / t.name, t, tables[t.name], progress)
            for t in spec.tables
        }
        manifest = Manifest(
            model=spec.name,
            version=version,
            created=now(),
            tables=entries,
            dense=None if dense is None else _write_dense(folder / DENSE_FILE, dense),
            metadata=dict(metadata or {}),
            watermark=dict(watermark or {}),
        )
        _sync_all(folder)
        write_manifest(folder / FILE_NAME, manifest)
        _sync(folder / FILE_NAME)
        _sync(folder)
        final = model / str(version)
        _put_in_place(folder, final, replace=replace or not described)
        write_spec(model, spec)
    return final


def _check_request(
    model: Path,
    spec: ModelSpec,
    version: int,
    tables: Mapping[str, Source],
    dense: Path | bytes | None,
    *,
    replace: bool,
    replace_spec: bool,
) -> None:
    if version < 1:
        raise ModelError(f"version must be 1 or more, found {version}")
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
    described = (model / SPEC_FILE).is_file()
    if described and (model / str(version)).exists() and not replace:
        raise ModelError(
            f"{model / str(version)} exists; take another version number, or replace it (--replace)"
        )
    if described and not replace_spec and load_model_spec(model / SPEC_FILE) != spec:
        raise ModelError(
            f"{model / SPEC_FILE} differs from the description of this version; versions of a model "
            "share it. Adopt it, take another model name, or replace it (--replace-spec)"
        )


def _write_table(
    folder: Path, spec: TableSpec, source: Source, progress: Callable[[int], None]
) -> TableEntry:
    folder.mkdir(parents=True)
    rows = 0
    with _Summed(folder / KEY_FILE) as key_file, _Summed(folder / VECTOR_FILE) as vector_file:
        for keys, vectors in _chunks(source):
            k, v = _checked(spec, keys, vectors)
            key_file.write(k)
            vector_file.write(v)
            rows += len(k)
            progress(len(k))
    return TableEntry(rows=rows, dim=spec.dim, key=key_file.entry(), emb_vector=vector_file.entry())


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


def _write_dense(path: Path, dense: Path | bytes) -> FileEntry:
    with _Summed(path) as out:
        if isinstance(dense, bytes):
            out.write(memoryview(dense))
        else:
            try:
                with dense.open("rb") as source:
                    while block := source.read(1 << 20):
                        out.write(memoryview(block))
            except OSError as error:
                raise ModelError(f"dense part {dense}: {error.strerror}") from error
    return out.entry()


class _Summed:
    """A new file whose checksum is taken while it is written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._digest = hashlib.sha256()
        self._bytes = 0

    def __enter__(self) -> _Summed:
        self._file = self._path.open("wb", buffering=0)
        return self

    def write(self, data: Any) -> None:
        view = memoryview(data).cast("B") if data.nbytes else memoryview(b"")
        self._digest.update(view)
        self._bytes += len(view)
        while len(view):
            view = view[self._file.write(view) :]

    def __exit__(self, *_exc: object) -> None:
        self._file.close()

    def entry(self) -> FileEntry:
        return FileEntry(bytes=self._bytes, checksum=f"sha256:{self._digest.hexdigest()}")


@contextmanager
def _hidden_folder(model: Path, version: int) -> Iterator[Path]:
    """A locked folder ``.import-<version>-<random>``, removed unless it was renamed away."""
    folder = model / f"{_PREFIX}{version}-{secrets.token_hex(4)}"
    _make_folder(folder)
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(f"cannot make the folder {folder}: {error.strerror}") from error


def clean_leftovers(model: Path) -> list[Path]:
    """Remove what killed writers left in a model's folder; returns what was removed."""
    removed = []
    for folder in model.glob(f"{_PREFIX}*"):
        try:
            lock = os.open(folder, os.O_RDONLY)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if folder.is_dir():
                shutil.rmtree(folder, ignore_errors=True)
            elif folder.stat().st_mtime > time.time() - _SPEC_SECONDS:
                continue
            else:
                folder.unlink()
            removed.append(folder)
        except (BlockingIOError, FileNotFoundError):
            pass
        finally:
            os.close(lock)
    return removed


def _put_in_place(folder: Path, final: Path, *, replace: bool) -> None:
    if final.exists():
        if not replace:
            raise ModelError(
                f"{final} was written by somebody else meanwhile; take another version"
            )
        old = final.with_name(f"{_PREFIX}replaced-{secrets.token_hex(4)}")
        final.rename(old)
        folder.rename(final)
        shutil.rmtree(old, ignore_errors=True)
    else:
        folder.rename(final)
    _sync(final.parent)


def write_spec(model: Path, spec: ModelSpec) -> None:
    """Write ``model.yaml`` in one step, unless it says the same already."""
    path = model / SPEC_FILE
    if path.is_file() and load_model_spec(path) == spec:
        return
    temporary = model / f"{_PREFIX}spec-{secrets.token_hex(4)}"
    temporary.write_text(dump_model_spec(spec))
    _sync(temporary)
    temporary.rename(path)
    _sync(model)


def _sync_all(folder: Path) -> None:
    """Bring every file to the disk; several at a time, as they share the file system's commits."""
    with ThreadPoolExecutor(_SYNCS, "hps-sync") as pool:
        list(pool.map(_sync, list(folder.rglob("*"))))


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
