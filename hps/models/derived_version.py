"""Versions made from another version of the same model: its tables with another network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hps.config.model_file import load_model_spec
from hps.errors import ModelError
from hps.models.manifest import DENSE_FILE, TABLES_FOLDER, Manifest, manifest_time
from hps.models.repository import SPEC_FILE, open_version
from hps.models.staging import clean_leftovers, hidden_folder, publish_version
from hps.models.table_sharing import Base, BaseVersion, find_base, link_table
from hps.models.version_writer import finish_version, write_dense

_NEWEST = 10**18
_ATTEMPTS = 20


def write_dense_version(
    root: Path | str,
    name: str,
    dense: Path | bytes,
    *,
    base: Base = "latest",
    version: int | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """Write a version that has the network ``dense`` and shares all tables with ``base``; returns its folder.

    Takes no time that depends on the tables' sizes: their files are linked and not read. ``version``: by
    default the next one, also if another process publishes one meanwhile. Raises ModelError."""
    model = Path(root) / name
    if not (model / SPEC_FILE).is_file():
        raise ModelError(f"{root} has no model '{name}'; make one with `hps model import`")
    spec = load_model_spec(model / SPEC_FILE)
    if spec.dense is None:
        raise ModelError(
            f"model '{name}' has no `dense:` section in {SPEC_FILE}, so it has no network"
        )
    shared = find_base(model, _NEWEST, base)
    if shared is None:
        raise ModelError(
            f"model '{name}' has no version with a manifest whose tables could be shared"
        )
    open_version(shared.folder, shared.manifest.version, spec)  # checks that its files fit
    clean_leftovers(model)
    for attempt in range(_ATTEMPTS):
        number = version or _next(model)
        try:
            return _write(model, number, dense, shared, dict(metadata or {}))
        except ModelError:
            taken = (model / str(number)).exists() and version is None
            if not taken or attempt == _ATTEMPTS - 1:
                raise
    raise AssertionError  # unreachable; for the type checker


def _next(model: Path) -> int:
    numbers = [int(each.name) for each in model.glob("[1-9]*") if each.name.isdecimal()]
    return max(numbers, default=0) + 1


def _write(
    model: Path, number: int, dense: Path | bytes, base: BaseVersion, metadata: dict[str, Any]
) -> Path:
    final = model / str(number)
    if final.exists():
        raise ModelError(f"{final} exists; take another version number")
    with hidden_folder(model, number) as folder:
        tables = {
            name: entry.model_copy(update={"origin": base.manifest.origin(name)})
            for name, entry in base.manifest.tables.items()
        }
        (folder / TABLES_FOLDER).mkdir()
        for name in tables:
            link_table(base, name, folder)
        manifest = Manifest(
            model=model.name,
            version=number,
            created=manifest_time(),
            tables=tables,
            dense=write_dense(folder / DENSE_FILE, dense),
            watermark=base.manifest.watermark,
            metadata=metadata,
        )
        finish_version(folder, manifest)
        publish_version(folder, final, replace=False)
    return final
