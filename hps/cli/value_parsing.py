"""Parse and format keys, vectors, versions and times."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from hps.errors import ConfigError
from hps.tools.output import FormattedNumber, age

if TYPE_CHECKING:
    from hps.types import EmbeddingTable, KeyArray, VectorArray

SHOWN_VALUES = 8
# Versions that are not times would be dates before this one.
DATED_SINCE_MS = 1_000_000_000_000


def parse_key(text: str) -> int:
    """Parse a decimal or hexadecimal (0x…) key to the int64 with the same bits.

    Raises ConfigError."""
    try:
        key = int(text, 16 if "x" in text.lower() else 10)
    except ValueError:
        raise ConfigError(f"{text!r} is not a key, a whole number from -2^63 to 2^64-1") from None
    if not -(2**63) <= key < 2**64:
        raise ConfigError(f"key {text} is outside -2^63 to 2^64-1")
    return key - 2**64 if key >= 2**63 else key


def parse_vector(text: str, table: EmbeddingTable) -> VectorArray:
    """Parse ``0.1, -2`` or ``[0.1, -2]`` to a row (1, row_width). Raises ConfigError."""
    try:
        values = [float(each) for each in text.strip().strip("[]").replace(",", " ").split()]
    except ValueError as error:
        raise ConfigError(f"--vector {text!r}: {error}; give numbers with commas") from None
    if len(values) != table.dim:
        raise ConfigError(
            f"--vector has {len(values)} values, table {table.id} has dim {table.dim}"
        )
    import numpy as np

    from hps.tiers.stored_rows import to_finite_rows

    with np.errstate(over="ignore"):
        vectors = np.array([values], np.float32)
    rows, finite = to_finite_rows(table, vectors)
    if not finite.all():
        raise ConfigError(
            f"--vector {text!r} holds a value that is no finite {table.row_format.name}"
        )
    return rows


def parse_version(text: str) -> int:
    """Parse a version: a number, or a time (``2026-01-31``, ``2026-01-31T12:00Z``) as its start."""
    try:
        version = int(text) if text.isdecimal() else _version_at(datetime.fromisoformat(text))
    except ValueError:
        raise ConfigError(
            f"{text!r} is neither a version (a whole number) nor a time like 2026-01-31T12:00Z"
        ) from None
    if not 0 <= version < 2**64:
        raise ConfigError(f"version {text} is outside 0 to 2^64-1 (the years 1970 to 2527)")
    return version


def _version_at(time: datetime) -> int:
    from hps.types import make_version

    known = time if time.tzinfo else time.replace(tzinfo=UTC)
    return make_version(round(known.timestamp() * 1000))


def as_typed(text: str) -> int:
    """Parse the number that the user typed; `parse_key` has accepted it."""
    return int(text, 16 if "x" in text.lower() else 10)


def key_array(table: EmbeddingTable, keys: list[int]) -> KeyArray:
    """Distinct ``keys`` in the given order, reduced to the table's key bits."""
    import numpy as np

    return table.narrow(np.array(list(dict.fromkeys(keys)), np.int64))


def shown_vector(vector: Any) -> str:
    values = [f"{value:.6g}" for value in vector[:SHOWN_VALUES]]
    if len(vector) > SHOWN_VALUES:
        values.append(f"… ({len(vector)} values)")
    return " ".join(values)


def shown_age(version: int) -> FormattedNumber:
    """The age of a row, if its version is a time."""
    from hps.types import version_unix_ms

    unix_ms = version_unix_ms(version)
    if unix_ms < DATED_SINCE_MS:
        return FormattedNumber("-")
    return age(datetime.now(UTC).timestamp() - unix_ms / 1000)
