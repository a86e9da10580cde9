"""Which reader a source needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from hps.errors import ModelError
from hps.models.importers.arrays import ArrayFile, reading
from hps.models.importers.hugectr import plan_folders, plan_ps_json
from hps.models.importers.npz import open_npz
from hps.models.importers.parquet import plan_parquet
from hps.models.importers.plan import ImportPlan, TableChoice, tables_from_arrays
from hps.models.importers.safetensors import open_safetensors
from hps.models.importers.torch import open_torch
from hps.models.tables import KEY_FILE

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
    """Look at a source without reading its rows. ``format`` is one of SOURCES, by default told from the
    name; ``model`` chooses one of a ``ps.json``. Raises ModelError."""
    if not path.exists():
        raise ModelError(f"{path} is missing")
    if not path.is_file() and not path.is_dir():  # to read it could take for ever
        raise ModelError(f"{path} is neither a file nor a folder; copy what it gives into a file")
    kind = format or detect(path)
    if kind == "ps.json":
        if choices:
            raise ModelError("a ps.json names its tables itself; leave --table out")
        return plan_ps_json(path, model)
    if kind not in SOURCES:
        raise ModelError(f"no format '{kind}'; expected one of {', '.join(SOURCES)}")
    with reading(path):
        if kind == "hugectr":
            return plan_folders(path, choices)
        if kind == "parquet":
            return plan_parquet(path, choices)
        return ImportPlan(path, kind, tables_from_arrays(ARRAY_FILES[kind](path), choices))


def detect(path: Path) -> str:
    """The kind of a source. Raises ModelError for what is none."""
    if path.is_dir():
        if (path / KEY_FILE).is_file() or any(path.glob(f"*/{KEY_FILE}")):
            return "hugectr"
        if any(path.glob("*.parquet")) or any(path.glob("*/*.parquet")):
            return "parquet"
        raise ModelError(
            f"{path} holds neither HugeCTR tables (folders with {KEY_FILE} and emb_vector) nor Parquet "
            "files; give the file itself"
        )
    kind = _SUFFIXES.get(path.suffix.lower())
    if kind is None:
        raise ModelError(
            f"{path}: the name does not tell the format; add --format, one of {', '.join(SOURCES)}"
        )
    return kind
