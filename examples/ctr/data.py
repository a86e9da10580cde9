"""Ad impressions of KDD Cup 2012, track 2 (the sample of OpenML 1220), as arrays.

One row: an ad was shown ``impression`` times at ``position`` among ``depth`` ads to a user's query;
``click`` says whether it was clicked at least once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import csv

# The model's features, each with the column that holds its keys.
FEATURES = {
    "user": "user_id",
    "query": "query_id",
    "ad": "ad_id",
    "title": "title_id",
    "description": "description_id",
    "keyword": "keyword_id",
    "url": "url_hash",
    "advertiser": "advertiser_id",
}
# Numbers beside them, given to the network as they are: it transforms them itself.
INPUTS = ("depth", "position", "impression")
LABEL = "click"
MAX_KEY = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Samples:
    """``keys[f] (n,) int64`` (unsigned 64-bit keys reinterpreted), ``inputs[name] (n, 1) float32``,
    ``clicked (n,) float32``."""

    keys: dict[str, NDArray[np.int64]]
    inputs: dict[str, NDArray[np.float32]]
    clicked: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.clicked)

    def take(self, rows: NDArray[np.int64]) -> Samples:
        return Samples(
            {name: keys[rows] for name, keys in self.keys.items()},
            {name: values[rows] for name, values in self.inputs.items()},
            self.clicked[rows],
        )

    def batches(self, size: int) -> Iterator[Samples]:
        """The samples in their order, ``size`` at a time."""
        for start in range(0, len(self), size):
            yield self.take(np.arange(start, min(start + size, len(self))))


@dataclass(frozen=True, slots=True)
class Split:
    """Row numbers of the three parts; no row is in two."""

    train: NDArray[np.int64]
    valid: NDArray[np.int64]
    test: NDArray[np.int64]


def split(rows: int, seed: int = 2012) -> Split:
    """70 % to learn from, 10 % to decide when to stop, 20 % to report on.

    At random: the file is not in time order, so it allows no split into past and future.
    """
    order = np.random.default_rng(seed).permutation(rows)
    test, valid = rows // 5, rows // 5 + rows // 10
    return Split(order[valid:], order[test:valid], order[:test])


def read_csv(path: Path) -> Samples:
    """All rows of the file. Raises ValueError naming the column of a cell that is no number.

    Columns are read as text: a reader that guesses types turns unsigned 64-bit hashes into floats.
    """
    columns = [*FEATURES.values(), *INPUTS, LABEL]
    options = csv.ConvertOptions(
        include_columns=columns, column_types=dict.fromkeys(columns, pa.string())
    )
    table: Any = csv.read_csv(str(path), convert_options=options)
    keys = {name: _keys(table[column], column) for name, column in FEATURES.items()}
    inputs = {name: _numbers(table[name], name)[:, None] for name in INPUTS}
    return Samples(keys, inputs, _numbers(table[LABEL], LABEL))


def parse_key(text: str) -> int:
    """The whole number that ``text`` denotes, exactly.

    The file's author wrote some hashes with 14 digits ("1.5234713295054e+19"). The rounded value
    stands wherever that hash stands, and no other hash of the file rounds to it, so the number as
    written is as good a key as any. Raises ValueError when it is no whole number of 64 bits.
    """
    try:
        value = Decimal(text)
        key = int(value)
    except (InvalidOperation, ValueError, OverflowError):
        raise ValueError(f"{text!r} is no number") from None
    if key != value or not 0 <= key <= MAX_KEY:
        raise ValueError(f"{text!r} is no whole number from 0 to 2^64-1")
    return key


def _keys(column: Any, name: str) -> NDArray[np.int64]:
    """Each distinct text is parsed once."""
    encoded = column.combine_chunks().dictionary_encode()
    try:
        distinct = [parse_key(text) for text in encoded.dictionary.to_pylist()]
    except (TypeError, ValueError) as error:
        raise ValueError(f"column {name}: {error}") from None
    keys = np.array(distinct, np.uint64).view(np.int64)
    positions: NDArray[np.int64] = encoded.indices.to_numpy()
    return keys[positions]


def _numbers(column: Any, name: str) -> NDArray[np.float32]:
    try:
        numbers: NDArray[np.float32] = column.cast(pa.float32()).to_numpy()
    except pa.ArrowInvalid as error:
        raise ValueError(f"column {name}: {error}") from None
    return numbers
