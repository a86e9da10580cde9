"""Sources of ``hps updates publish``: files, model versions, and the difference of two versions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hps.errors import BadRequest, ConfigError, NotFound

if TYPE_CHECKING:
    from hps.config.repository_uri import Location
    from hps.models.repository import ModelVersion, Repository
    from hps.tiers.positions import TableChanges

BLOCK = 1 << 14

Step = Callable[[int], None]


@dataclass(slots=True)
class PublishedRows:
    """Rows of one table to send.

    ``changes(step)`` reports the rows read, of ``total``, to ``step``. ``rows`` and ``deleted`` count
    the sent ones, ``unsent`` the deletions that the format cannot hold."""

    table: str
    total: int
    key_bits: Literal[32, 64]
    changes: Callable[[Step], Iterable[TableChanges]]
    rows: int = 0
    deleted: int = 0
    unsent: int = 0


def from_file(path: Path, model: str, table: str | None, version: int | None) -> PublishedRows:
    from hps.updates.files.row_files import open_rows
    from hps.updates.version_clock import VersionClock

    try:
        opened = open_rows(path)
    except (BadRequest, OSError) as error:
        raise ConfigError(str(error)) from None
    if table is None:
        if opened.table is None or opened.table.partition("/")[0] != model:
            raise ConfigError(
                f"{path} holds rows of {opened.table or 'a table it does not name'}; name the table: "
                f"hps updates publish {model} TABLE --file {path}"
            )
        table = opened.table.partition("/")[2]

    def changes(step: Step) -> Iterator[TableChanges]:
        for each in opened.changes(BLOCK, VersionClock().now()):
            yield each if version is None else _with_version(each, version)
            step(len(each.keys) + len(each.deleted))

    return PublishedRows(table, opened.rows, 64, changes)


def from_versions(
    repository: Location, model: str, table: str | None, base: int | None, new: int, at: int | None
) -> Iterator[PublishedRows]:
    from hps.cli.options import open_repository
    from hps.rows.files import FileRows
    from hps.rows.version_diff import all_rows, diff_versions

    models = open_repository(repository)
    now = models.open(model, new)
    tables = now.embedding_tables()
    if table is not None and table not in tables:
        raise NotFound(f"model {model!r} has no table {table!r}; it has {', '.join(tables)}")
    old = None if base is None else _base(models, now, base)
    for name in [table] if table else tables:
        files, wanted = FileRows(now), tables[name]
        version = files.row_version(wanted) if at is None else at
        if old is None:
            changes = partial(all_rows, files, wanted, version)
            total = files.entries(wanted)
        else:
            before, known = FileRows(old), old.embedding_tables()[name]
            if version < before.row_version(known):
                raise ConfigError(
                    f"version {new} was made before version {base}: stores would keep the rows of {base} "
                    f"(table {name}); say --at now if the ones of {new} are to win"
                )
            changes = partial(diff_versions, before, known, files, wanted, version)
            total = before.entries(known) + files.entries(wanted)
        yield PublishedRows(name, total, wanted.key_bits, changes)


def _base(models: Repository, new: ModelVersion, base: int) -> ModelVersion:
    if base == new.version:
        raise ConfigError(f"--base and --new are both {base}: there is no difference to send")
    return models.open(new.name, base)


def _with_version(changes: TableChanges, version: int) -> TableChanges:
    import numpy as np

    stamps = [np.full(len(keys), version, np.uint64) for keys in (changes.keys, changes.deleted)]
    return replace(changes, versions=stamps[0], deleted_versions=stamps[1])
