"""The models: whether each of them can be opened."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hps.cli.diagnosis.check import Check, failed
from hps.cli.output import plural
from hps.errors import HpsError

if TYPE_CHECKING:
    from hps.config import Configuration
    from hps.config.schema import ModelOverride
    from hps.models.repository import ModelVersion, Repository


def models(configuration: Configuration) -> Iterator[tuple[Check, ModelVersion | None]]:
    """Every model that would be served, and its version if it can be opened."""
    from hps.models.repository import Repository, open_legacy

    settings = configuration.settings.models
    opened: dict[str, Callable[[], ModelVersion]] = {
        legacy.spec.name: partial(open_legacy, legacy) for legacy in configuration.legacy
    }
    overrides = settings.serve or {}
    repository = Repository(settings.repository)
    names = list(overrides)
    if settings.serve is None and (not opened or settings.repository.is_dir()):
        try:
            names = repository.names()
        except HpsError as error:
            yield failed("models", error, "set models.repository"), None
            return
    open_it = _described if configuration.settings.server.role == "frontend" else _whole
    for name in names:
        opened.setdefault(name, partial(open_it, repository, name, overrides.get(name)))
    if not opened:
        found = f"no model in {settings.repository}"
        yield Check("models", "FAIL", found, "import one: hps model import --help"), None
    for name, opens in opened.items():
        yield _model(name, opens, settings.repository)


def _whole(repository: Repository, name: str, override: ModelOverride | None) -> ModelVersion:
    return repository.open(name, override=override)


def _described(repository: Repository, name: str, override: ModelOverride | None) -> ModelVersion:
    """As a front end has it: which version is served the lookup nodes say, and rows are theirs."""
    chosen = None if override is None else override.version
    there = repository.versions(name)
    return repository.without_rows(name, chosen or (there[-1] if there else 1), override)


def _model(
    name: str, open_it: Callable[[], ModelVersion], repository: Path
) -> tuple[Check, ModelVersion | None]:
    try:
        version = open_it()
    except HpsError as error:
        mend = f"hps model verify {name} --repository {repository}"
        return failed(f"model {name}", error, mend), None
    if not version.tables and version.spec.tables:
        return Check(f"model {name}", "OK", "described here, its rows are at lookup nodes"), version
    rows = sum(files.rows for files in version.tables.values())
    tables = plural(len(version.tables), "table")
    found = f"version {version.version}, {tables}, {plural(rows, 'row')}"
    return Check(f"model {name}", "OK", found), version
