"""Import sources: formats and their readers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from hps.errors import ModelError
from hps.models.importers.arrays import ArrayFile, import_errors
from hps.models.importers.hugectr import plan_folders, plan_ps_json
from hps.models.importers.npz import open_npz
from hps.models.importers.parquet import plan_parquet
from hps.models.importers.plan import ImportPlan, TableChoice, tables_from_arrays
from hps.models.importers.safetensors import open_safetensors
from hps.models.importers.torch import open_torch
from hps.models.manifest import KEY_FILE

ARRAY_FILES: dict[str, Callable[[Path], ArrayFile]] = {
    "npz": open_npz,
    "safetensors": open_safetensors,
    "torch": open_torch,
}
SOURCES = ("ps.json", "hugectr", "parquet", *ARRAY_FILES)
_SUFFIXES = {
    ".json": "ps.json",
    ".npz": "npz",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".safetensors": "safetensors",
    ".pt": "torch",
    ".pth": "torch",
    ".bin": "torch",
    ".ckpt": "torch",
}


def plan_import(
    path: Path,
    choices: Sequence[TableChoice] = (),
    *,
    format: str | None = None,
    model: str | None = None,
) -> ImportPlan:
    """Plan an import without reading rows. Raises ModelError.

    ``format`` is one of SOURCES, by default inferred from the name; ``model`` chooses one of a
    ``ps.json``. A choice may name an array of another file, ``FILE:ARRAY``. If ``path`` is a file of
    arrays, a choice may also name a Parquet file."""
    kind = _kind(path, format)
    if kind == "ps.json":
        if choices:
            raise ModelError("a ps.json names its tables itself; leave --table out")
        return plan_ps_json(path, model)
    own: list[TableChoice] = []
    others: dict[Path, list[TableChoice]] = {}
    for choice in choices:
        file, array = _other_file(kind, choice)
        choice = _with_keys_of(file or path, choice)
        if file is None or file == path:
            own.append(choice if file is None else replace(choice, sources=array))
        else:
            others.setdefault(file, []).append(replace(choice, sources=array))
    plans = [_plan(path, kind, own)]
    plans += [_plan(file, _kind(file, None), wanted) for file, wanted in others.items()]
    tables = [table for plan in plans for table in plan.tables]
    order = [choice.name for choice in choices if choice.name]
    tables.sort(key=lambda t: order.index(t.name) if t.name in order else -1)
    names = [table.name for table in tables]
    for name in names:
        if names.count(name) > 1:
            raise ModelError(f"two tables are called '{name}'; name them: --table NAME=SOURCE")
    return ImportPlan(path, "+".join(dict.fromkeys(plan.format for plan in plans)), tuple(tables))


def _kind(path: Path, format: str | None) -> str:
    if not path.exists():
        raise ModelError(f"{path} is missing")
    if not path.is_file() and not path.is_dir():  # a pipe or a device may have no end
        raise ModelError(f"{path} is neither a file nor a folder; copy its contents to a file")
    kind = format or detect(path)
    if kind not in SOURCES:
        raise ModelError(f"no format '{kind}'; expected one of {', '.join(SOURCES)}")
    return kind


def _other_file(kind: str, choice: TableChoice) -> tuple[Path | None, tuple[str, ...]]:
    """Return the other file that ``choice`` names, if any, and its arrays; ``kind``: this source's format."""
    split = [source.rpartition(":") for source in choice.sources]
    files = {Path(file) for file, _, array in split if array and Path(file).is_file()}
    if files:
        if len(files) > 1 or not all(Path(file) in files for file, *_ in split):
            raise ModelError(
                f"table '{choice.name}' stacks {', '.join(choice.sources)}; stack arrays of one file"
            )
        return files.pop(), tuple(array for *_, array in split)
    if len(choice.sources) == 1 and (file := Path(choice.sources[0])).exists():
        other = _folder_kind(file) if file.is_dir() else _SUFFIXES.get(file.suffix.lower())
        if other not in (None, kind):
            return file, () if other in ARRAY_FILES else (str(file),)
    return None, ()


def _with_keys_of(file: Path, choice: TableChoice) -> TableChoice:
    """Remove the file name from the choice's ``keys``, which may be ``FILE:ARRAY`` like the vectors."""
    named, _, array = (choice.keys or "").rpartition(":")
    if not array or not Path(named).is_file():
        return choice
    if Path(named) != file:
        raise ModelError(
            f"the keys of table '{choice.name}' are in {named}, its vectors in {file}; put both into one file"
        )
    return replace(choice, keys=array)


def _plan(path: Path, kind: str, choices: Sequence[TableChoice]) -> ImportPlan:
    with import_errors(path):
        if kind == "hugectr":
            return plan_folders(path, choices)
        if kind == "parquet":
            return plan_parquet(path, choices)
        return ImportPlan(path, kind, tables_from_arrays(ARRAY_FILES[kind](path), choices))


def detect(path: Path) -> str:
    """Return the format of a source. Raises ModelError if it is unknown."""
    if path.is_dir():
        kind = _folder_kind(path)
        if kind is None:
            raise ModelError(
                f"{path} holds neither HugeCTR tables (folders with {KEY_FILE} and emb_vector) nor "
                "Parquet files; give the file itself"
            )
        return kind
    kind = _SUFFIXES.get(path.suffix.lower())
    if kind is None:
        raise ModelError(
            f"{path}: the name does not show the format; add --format, one of {', '.join(SOURCES)}"
        )
    return kind


def _folder_kind(path: Path) -> str | None:
    if (path / KEY_FILE).is_file() or any(path.glob(f"*/{KEY_FILE}")):
        return "hugectr"
    if any(path.glob("*.parquet")) or any(path.glob("*/*.parquet")):
        return "parquet"
    return None
