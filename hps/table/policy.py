"""Score policies: what a row's 64-bit score means, and how writes change it."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hps.errors import BadRequest
from hps.native.twin_scored import ScoreRule

MOST_EPOCH = 2**32 - 1
_TICK_SHIFT = 20
"""Nanoseconds per tick of an epoch's clock, as a power of two: 1.05 ms."""


class Policy(StrEnum):
    """The meaning of a row's score. The lowest score is evicted first.

    Names and bits are those of HierarchicalKV's strategies (``EvictStrategy`` in merlin_hashtable.cuh).

    ``LRU``: nanoseconds of the clock at the last write. ``LFU``: the sum of the caller's scores, each 1 if
    the caller gives none, up to 2^64 - 1. ``EPOCH_LRU``: the epoch of the last write in the high 32 bits; in
    the low ones the clock's nanoseconds >> 20. ``EPOCH_LFU``: the epoch of the last write in the high 32
    bits; in the low ones the sum of the low 32 bits of the caller's scores, up to 2^32 - 1. ``CUSTOMIZED``:
    the caller's score.
    """

    LRU = "lru"
    LFU = "lfu"
    EPOCH_LRU = "epoch_lru"
    EPOCH_LFU = "epoch_lfu"
    CUSTOMIZED = "customized"

    @property
    def takes_scores(self) -> bool:
        """Whether the caller may give scores."""
        return self not in (Policy.LRU, Policy.EPOCH_LRU)


class Scoring(NamedTuple):
    """How one write changes scores; see `ScoreRule`."""

    rule: ScoreRule
    base: int = 0
    scores: NDArray[np.uint64] | None = None


UNCHANGED = Scoring(ScoreRule.KEEP)


def scoring_of(
    policy: Policy, scores: NDArray[np.uint64] | None, now_ns: int, epoch: int
) -> Scoring:
    """Return how a write at ``now_ns`` in ``epoch`` changes scores. Raises ``BadRequest`` for scores that the
    policy does not take, and where it needs some."""
    if scores is not None and not policy.takes_scores:
        raise BadRequest(
            f"scores were given, but policy {policy} takes none: it sets a row's score by its clock"
        )
    match policy:
        case Policy.LRU:
            return Scoring(ScoreRule.BASE, now_ns % 2**64)
        case Policy.LFU:
            return Scoring(ScoreRule.ADD, 0, scores)
        case Policy.EPOCH_LRU:
            return Scoring(ScoreRule.BASE, epoch << 32 | (now_ns >> _TICK_SHIFT) % 2**32)
        case Policy.EPOCH_LFU:
            return Scoring(ScoreRule.EPOCH_ADD, epoch << 32, scores)
        case Policy.CUSTOMIZED:
            if scores is None:
                raise BadRequest("no scores were given, but policy customized needs one per key")
            return Scoring(ScoreRule.GIVEN, 0, scores)
