"""Parts made of parts: what a wrapper asks for in a caller's place, and how the answer gets back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hps.tiers.base import Part
from hps.types import IndexArray

_ALL = slice(None)


def new_part_for_misses(part: Part) -> Part:
    """A part with arrays of its own for the keys that ``part`` lacks."""
    return Part.make(part.table, part.keys[part.missing])


def restrict_part(part: Part, missing: IndexArray) -> Part:
    """The same arrays, of which only the positions ``missing`` are asked for."""
    return Part(part.table, part.keys, part.out, part.versions, part.source, missing)


def copy_part(part: Part, asked: IndexArray) -> Part:
    """Arrays of their own with what ``part`` says of its positions ``asked``."""
    missing = np.flatnonzero(_still_missing(part)[asked])
    return Part(
        part.table,
        part.keys[asked],
        part.out[asked],
        part.versions[asked],
        part.source[asked],
        missing,
    )


def copy_answer(answer: Part, part: Part, at: IndexArray | slice = _ALL) -> None:
    """Give ``part`` what ``answer`` holds: the key ``part.missing[i]`` stands at ``at[i]`` there."""
    asked, missed, source = part.missing, _still_missing(answer)[at], answer.source[at]
    rows, done = source != 0, ~missed
    part.out[asked[rows]] = answer.out[at][rows]
    part.versions[asked[done]] = answer.versions[at][done]
    part.source[asked[done]] = source[done]
    part.missing = asked[missed]


def merge_misses(shares: Sequence[Part]) -> IndexArray:
    """The positions that any of ``shares`` of one part still lacks, ascending."""
    if len(shares) == 1:
        return shares[0].missing
    return np.sort(np.concatenate([each.missing for each in shares]))


def _still_missing(part: Part) -> NDArray[np.bool_]:
    still = np.zeros(len(part.keys), bool)
    still[part.missing] = True
    return still
