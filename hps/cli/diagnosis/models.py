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
    from hps.models.repository import ModelVersion


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
    for name in names:
        opened.setdefault(name, partial(repository.open, name, override=overrides.get(name)))
    if not opened:
        found = f"no model in {settings.repository}"
        yield Check("models", "FAIL", found, "import one: hps model import --help"), None
    for name, open_it in opened.items():
        yield _model(name, open_it, settings.repository)


def _model(
    name: str, open_it: Callable[[], ModelVersion], repository: Path
) -> tuple[Check, ModelVersion | None]:
    try:
        version = open_it()
    except HpsError as error:
        mend = f"hps model verify {name} --repository {repository}"
        return failed(f"model {name}", error, mend), None
    rows = sum(files.rows for files in version.tables.values())
    tables = plural(len(version.tables), "table")
    found = f"version {version.version}, {tables}, {plural(rows, 'row')}"
    return Check(f"model {name}", "OK", found), version
