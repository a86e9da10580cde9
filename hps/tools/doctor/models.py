"""Checks that each model can be opened."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hps.errors import HpsError
from hps.tools.doctor.check import DoctorCheck, failed
from hps.tools.output import plural

if TYPE_CHECKING:
    from hps.config import Configuration
    from hps.models.repository import ModelVersion


def models(configuration: Configuration) -> Iterator[tuple[DoctorCheck, ModelVersion | None]]:
    """Open every model that would be served, its network included; None if it cannot be opened."""
    from hps.node.model_opening import check_models

    repository = configuration.settings.models.repository
    try:
        for name, found in check_models(configuration):
            if isinstance(found, HpsError):
                remedy = f"hps model verify {name} --repository {repository}"
                yield failed(f"model {name}", found, remedy), None
            else:
                yield _opened(found), found
    except HpsError as error:
        yield failed("models", error), None


def _opened(version: ModelVersion) -> DoctorCheck:
    name = f"model {version.name}"
    if not version.tables and version.spec.tables:
        return DoctorCheck(name, "OK", "described here, its rows are at lookup nodes")
    rows = sum(files.rows for files in version.tables.values())
    tables = plural(len(version.tables), "table")
    return DoctorCheck(name, "OK", f"version {version.version}, {tables}, {plural(rows, 'row')}")
