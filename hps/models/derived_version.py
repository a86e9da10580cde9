"""Versions made from another version of the same model, such as its tables with another network."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hps.config.model_file import load_model_spec
from hps.config.model_schema import ModelSpec
from hps.errors import ModelError
from hps.models.manifest import DENSE_FILE, TABLES_FOLDER, Manifest, manifest_time
from hps.models.repository import SPEC_FILE, check_version_number, open_version
from hps.models.staging import clean_leftovers, hidden_folder, publish_version
from hps.models.table_sharing import Base, find_base, link_table
from hps.models.version_writer import finish_version, write_dense

_NEWEST = 10**18
_ATTEMPTS = 20


def derive_dense_version(
    root: Path | str,
    name: str,
    dense: Path | bytes,
    *,
    base: Base = "latest",
    version: int | None = None,
    metadata: Mapping[str, Any] | None = None,
    check: Callable[[ModelSpec], None] = lambda _spec: None,
) -> Path:
    """Write a version that has the network ``dense`` and shares all tables with ``base``; returns its folder.

    Takes no time that depends on the tables' sizes: their files are linked and not read. ``version``: by
    default the next one, also if another process publishes one meanwhile. ``check`` raises if the network
    does not fit the description; `hps.node.dense_version` has one. Raises ModelError."""
    model = Path(root) / name
    if not (model / SPEC_FILE).is_file():
        raise ModelError(f"{root} has no model '{name}'; make one with `hps model import`")
    spec = load_model_spec(model / SPEC_FILE)
    if spec.dense is None:
        raise ModelError(
            f"model '{name}' has no `dense:` section in {SPEC_FILE}, so it has no network"
        )
    check(spec)
    shared = find_base(model, _NEWEST, base)
    if shared is None:
        raise ModelError(
            f"model '{name}' has no version with a manifest whose tables could be shared"
        )
    open_version(shared.folder, shared.manifest.version, spec)  # checks that its files fit
    tables = {
        table: entry.model_copy(update={"origin": shared.manifest.origin(table)})
        for table, entry in shared.manifest.tables.items()
    }
    with next_version_folder(model, version) as (folder, publish):
        (folder / TABLES_FOLDER).mkdir()
        for table in tables:
            link_table(shared, table, folder)
        manifest = Manifest(
            model=name,
            version=1,
            created=manifest_time(),
            tables=tables,
            dense=write_dense(folder / DENSE_FILE, dense),
            watermark=shared.manifest.watermark,
            metadata=dict(metadata or {}),
        )
        return publish(lambda number: manifest.model_copy(update={"version": number}))
    raise AssertionError  # unreachable: the context swallows nothing; for the type checker


Publish = Callable[[Callable[[int], Manifest]], Path]
"""Publishes a folder under a number, with the manifest that the function makes for it; returns its path."""


@contextmanager
def next_version_folder(model: Path, version: int | None) -> Iterator[tuple[Path, Publish]]:
    """Make a hidden folder, and a function that publishes it as ``version``, by default the next one.

    The next number is taken when the version is complete, and the one after it if another process is faster.
    Raises ModelError if ``version`` exists."""
    check_version_number(version or _next(model))
    if version is not None and (model / str(version)).exists():
        raise ModelError(f"{model / str(version)} exists; take another version number")
    clean_leftovers(model)
    with hidden_folder(model, version or _next(model)) as folder:

        def publish(manifest_of: Callable[[int], Manifest]) -> Path:
            for attempt in range(_ATTEMPTS):
                number = version or _next(model)
                finish_version(folder, manifest_of(number))
                try:
                    publish_version(folder, model / str(number), replace=False)
                    return model / str(number)
                except ModelError:
                    if version is not None or attempt == _ATTEMPTS - 1:
                        raise
            raise AssertionError  # unreachable; for the type checker

        yield folder, publish


def _next(model: Path) -> int:
    numbers = [int(each.name) for each in model.glob("[1-9]*") if each.name.isdecimal()]
    return max(numbers, default=0) + 1
