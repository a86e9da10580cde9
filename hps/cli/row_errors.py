"""Errors of rows in narrow formats, as commands show them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hps.tools.output import count, number

if TYPE_CHECKING:
    from hps.models.manifest import RowConversion
    from hps.models.repository import ModelVersion

ERROR_TITLES = "max error", "mean error", "of a row"


def row_errors(opened: ModelVersion, table: str) -> RowConversion | None:
    """The errors of a table's rows in its manifest; None if they are not narrow, or were not measured."""
    entry = opened.manifest.tables.get(table) if opened.manifest else None
    return None if entry is None else entry.errors


def row_errors_json(opened: ModelVersion, table: str) -> dict[str, Any] | None:
    """`row_errors` for JSON."""
    errors = row_errors(opened, table)
    return None if errors is None else errors.model_dump()


def errors_row(errors: RowConversion | None) -> tuple[str, str, str]:
    """The cells below `ERROR_TITLES`."""
    if errors is None:
        return "", "", ""
    relative = number(100 * errors.mean_relative_error, "{:.3g} %")
    return number(errors.max_error, "{:.3g}"), number(errors.mean_error, "{:.3g}"), relative


def errors_text(errors: RowConversion) -> str:
    """The errors in a line of text."""
    largest, mean, relative = errors_row(errors)
    text = f"error of a value at most {largest}, {mean} on average; {relative} of a row's norm"
    if errors.not_finite_rows:
        text += f"; {count(errors.not_finite_rows)} rows are not finite in this format"
    return text
