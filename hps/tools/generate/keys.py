"""Distributions of row numbers for generated requests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from hps.errors import ConfigError
from hps.types import IndexArray

Draw = Callable[[np.random.Generator, int], IndexArray]
"""``draw(random, n)``: ``(n,)`` row numbers."""

FORMS = "uniform, zipf:S, hot:SHARE,COVERAGE or trace:FILE.npy"
# A multiplication spreads ranks over the rows, so that hot rows are not neighbours.
_SPREAD = 0x9E3779B97F4A7C15


def distribution(text: str, rows: int) -> Draw:
    """The distribution that ``text`` names, over row numbers 0 … ``rows`` - 1. Raises ConfigError.

    ``uniform``. ``zipf:S``: the k-th most frequent row has a probability in proportion to k^-S; ranks are
    drawn by the inverse of the bounded Pareto distribution, as in HPS's profiler, which needs no memory.
    ``hot:SHARE,COVERAGE``: the share SHARE of the rows gets the share COVERAGE of the keys.
    ``trace:FILE``: the row numbers of a NumPy file, in their order, repeated from the start."""
    name, _, argument = text.partition(":")
    if rows < 1:
        raise ConfigError("a table without rows has no keys to ask for")
    if name == "uniform" and not argument:
        return lambda random, n: random.integers(0, rows, n)
    if name == "zipf":
        return _zipf(_number(text, argument or "1.2"), rows)
    if name == "hot":
        share, comma, coverage = argument.partition(",")
        if comma:
            return _hot(text, _number(text, share), _number(text, coverage), rows)
    if name == "trace" and argument:
        return _trace(Path(argument), rows)
    raise ConfigError(f"distribution of keys {text}: expected {FORMS}")


def _number(text: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ConfigError(f"distribution of keys {text}: {value!r} is no number") from None


def _zipf(s: float, rows: int) -> Draw:
    if not 0 < s < 10:
        raise ConfigError(
            f"distribution of keys zipf:{s:g}: the exponent must lie between 0 and 10"
        )
    exponent = 1 - s

    def draw(random: np.random.Generator, n: int) -> IndexArray:
        part = random.random(n)
        if abs(exponent) < 1e-9:
            ranks = np.exp(part * np.log(rows + 1))
        else:
            ranks = (part * ((rows + 1) ** exponent - 1) + 1) ** (1 / exponent)
        return _spread(np.minimum(ranks.astype(np.int64) - 1, rows - 1), rows)

    return draw


def _hot(text: str, share: float, coverage: float, rows: int) -> Draw:
    if not (0 < share <= 1 and 0 <= coverage <= 1):
        raise ConfigError(f"distribution of keys {text}: both shares must lie between 0 and 1")
    hot = max(1, round(share * rows))

    def draw(random: np.random.Generator, n: int) -> IndexArray:
        of_hot = random.random(n) < coverage
        ranks = np.where(of_hot, random.integers(0, hot, n), random.integers(0, rows, n))
        if hot < rows:
            cold = random.integers(hot, rows, n)
            ranks = np.where(of_hot, ranks, cold)
        return _spread(ranks, rows)

    return draw


def _trace(path: Path, rows: int) -> Draw:
    try:
        numbers = np.load(path, mmap_mode="r")
    except (OSError, ValueError) as error:
        raise ConfigError(f"distribution of keys trace:{path}: {error}") from None
    if numbers.dtype.kind not in "iu" or numbers.ndim != 1 or not len(numbers):
        raise ConfigError(
            f"distribution of keys trace:{path}: expected integers (n,), found {numbers.dtype} "
            f"{numbers.shape}"
        )
    at = 0

    def draw(random: np.random.Generator, n: int) -> IndexArray:
        nonlocal at
        taken = np.take(numbers, np.arange(at, at + n), mode="wrap").astype(np.int64)
        at = (at + n) % len(numbers)
        if n and (taken.min() < 0 or taken.max() >= rows):
            raise ConfigError(
                f"distribution of keys trace:{path}: row numbers from {taken.min()} to {taken.max()}, the "
                f"table has {rows} rows"
            )
        return taken

    return draw


def _spread(ranks: IndexArray, rows: int) -> IndexArray:
    """Map ranks to rows by a fixed permutation."""
    factor = _SPREAD % rows or 1
    while np.gcd(factor, rows) != 1:
        factor += 1
    if rows < 2**31:
        return ranks * np.int64(factor % rows or 1) % rows
    return np.array([rank * factor % rows for rank in ranks.tolist()], np.int64)
