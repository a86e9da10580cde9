"""HugeCTR sparse model folders (``key``, ``emb_vector``), named directly or by an HPS ``ps.json``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from hps.config import load_config
from hps.config.ps_json.legacy import LegacyModel
from hps.errors import ModelError
from hps.models.check import check_disjoint_tables
from hps.models.importers.arrays import block_rows
from hps.models.importers.plan import ImportPlan, ImportTable, TableChoice, table_name
from hps.models.manifest import KEY_FILE, VECTOR_FILE
from hps.models.repository import open_legacy
from hps.models.tables import KEY_BYTES, VALUE_BYTES, TableFiles, open_table


def plan_folders(path: Path, choices: Sequence[TableChoice]) -> ImportPlan:
    """Plan from a table's folder, or from a folder with one folder per table.

    The dim is the ratio of the two files' sizes."""
    if not choices:
        if (path / KEY_FILE).is_file():
            choices = [TableChoice(table_name(path.resolve().name), (str(path),))]
        else:
            found = sorted(p.parent.name for p in path.glob(f"*/{KEY_FILE}"))
            choices = [TableChoice(table_name(name), (name,)) for name in found]
    if not choices:
        raise ModelError(f"{path}: no folder in it holds the files {KEY_FILE} and {VECTOR_FILE}")
    return ImportPlan(path, "hugectr", tuple(_folder_table(path, c) for c in choices))


def _folder_table(path: Path, choice: TableChoice) -> ImportTable:
    if choice.keys is not None or len(choice.sources) > 1:
        raise ModelError(f"table '{choice.name}': HugeCTR folders bring their own keys, one each")
    source = choice.sources[0] if choice.sources else choice.name
    name = choice.name or table_name(Path(source).name)
    folder = (
        Path(source) if not (path / source).is_dir() and Path(source).is_dir() else path / source
    )
    key_bytes, vector_bytes = (_size(folder / file) for file in (KEY_FILE, VECTOR_FILE))
    rows = key_bytes // KEY_BYTES
    if not rows or vector_bytes % (rows * VALUE_BYTES):
        raise ModelError(
            f"{folder}: {KEY_FILE} has {key_bytes} bytes ({rows} keys), {VECTOR_FILE} {vector_bytes}: no "
            f"dim fits (expected a multiple of {max(rows, 1) * VALUE_BYTES} bytes); a file is truncated"
        )
    dim = vector_bytes // (rows * VALUE_BYTES)
    if not dim:
        raise ModelError(f"{folder / VECTOR_FILE} is empty, but there are {rows} keys")
    return _table(open_table(folder, name, dim, None))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from error


def plan_ps_json(path: Path, model: str | None = None) -> ImportPlan:
    """Plan one model of a ``ps.json``: its tables, names, dims and defaults.

    Raises ModelError or ConfigError."""
    models = {m.spec.name: m for m in load_config(path).legacy}
    if model is None and len(models) == 1:
        (model,) = models
    if model not in models:
        found = ", ".join(models) or "none"
        raise ModelError(
            f"{path} describes the models {found}; choose one of them with --model"
            if model is None
            else f"{path} has no model '{model}'; it describes {found}"
        )
    return plan_legacy(path, models[model])


def plan_legacy(path: Path, model: LegacyModel) -> ImportPlan:
    version = open_legacy(model)
    for table in version.embedding_tables().values():
        check_disjoint_tables(version.tables[table.name], table.key_bits)
    tables = tuple(_table(files) for files in version.tables.values())
    return ImportPlan(path, "ps.json", tables, model.spec)


def _table(files: TableFiles) -> ImportTable:
    chunks = partial(files.blocks, block_rows(files.dim))
    return ImportTable(files.name, files.dim, files.rows, chunks, stamps=files.stamps)
