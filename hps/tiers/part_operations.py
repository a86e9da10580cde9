"""Split, copy and merge `Part`s."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hps.tiers.base import Part
from hps.types import IndexArray

_ALL = slice(None)


def new_part_for_misses(part: Part) -> Part:
    """Make a part, with new arrays, for the keys that ``part`` misses."""
    return Part.make(part.table, part.keys[part.missing])


def restrict_part(part: Part, missing: IndexArray) -> Part:
    """Return a part with the same arrays and only the positions ``missing`` to fetch."""
    return Part(part.table, part.keys, part.out, part.versions, part.source, missing)


def copy_part(part: Part, positions: IndexArray) -> Part:
    """Copy the keys of ``part`` at ``positions``, with their answers, into new arrays."""
    missing = np.flatnonzero(_still_missing(part)[positions])
    return Part(
        part.table,
        part.keys[positions],
        part.out[positions],
        part.versions[positions],
        part.source[positions],
        missing,
    )


def copy_answer(answer: Part, part: Part, at: IndexArray | slice = _ALL) -> None:
    """Copy ``answer`` into ``part``: entry ``at[i]`` of ``answer`` answers the key ``part.missing[i]``."""
    wanted, missed, source = part.missing, _still_missing(answer)[at], answer.source[at]
    rows, done = source != 0, ~missed
    part.out[wanted[rows]] = answer.out[at][rows]
    part.versions[wanted[done]] = answer.versions[at][done]
    part.source[wanted[done]] = source[done]
    part.missing = wanted[missed]


def merge_misses(shares: Sequence[Part]) -> IndexArray:
    """Return the ascending positions that any of ``shares``, views of one part, still misses."""
    if len(shares) == 1:
        return shares[0].missing
    return np.sort(np.concatenate([each.missing for each in shares]))


def _still_missing(part: Part) -> NDArray[np.bool_]:
    still = np.zeros(len(part.keys), bool)
    still[part.missing] = True
    return still
