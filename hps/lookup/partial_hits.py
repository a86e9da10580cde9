"""What the short way lacks: rows of bags that are not in memory. The tiers are asked for these alone.

Bags that lack a row are pooled anew once it is there, rather than having it added at the end: sums
are taken in the order of the keys, so a request's vectors do not depend on what was in memory, to the
last bit, and those of float16 tables are rounded once. What is read again was read just before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hps.lookup.lookup_job import LookupJob, fill_defaults
from hps.native import dedup
from hps.observability.meters import Answers
from hps.tiers.bags import Bags
from hps.tiers.base import Part
from hps.tiers.fused_lookup import FusedLookup
from hps.types import (
    EmbeddingTable,
    IndexArray,
    KeyArray,
    LookupRequest,
    LookupResult,
    Source,
    SourceArray,
    VectorArray,
)

_DEFAULT = int(Source.DEFAULT)


@dataclass(frozen=True, slots=True)
class TablePartialHit:
    """One table's: its position among the request's tables, its ``bags`` that lack rows, each with the
    position of its first key among all of the table's, and what makes these ``(n,)``."""

    table: EmbeddingTable
    position: int
    bags: Sequence[tuple[int, Bags]]
    keys: Callable[[], KeyArray]

    def missing(self) -> KeyArray:
        """The keys that have no row; they may repeat."""
        flat = [bags.keys[bags.missing] for _, bags in self.bags]
        return flat[0] if len(flat) == 1 else np.concatenate(flat)


@dataclass(frozen=True, slots=True)
class PartialHit:
    """A request that memory answered but for some rows. ``tables``: those that lack some; ``answers``: of all
    tables, as if none did; ``vectors``: by feature, to be completed in place."""

    tier: FusedLookup
    tables: Sequence[TablePartialHit]
    answers: Answers
    vectors: dict[str, VectorArray]
    started: float


class PartialHitJob(LookupJob):
    """The rest of the way of a request that memory answered in part: each missing key once."""

    __slots__ = ("_gaps", "_inverses")

    def __init__(self, request: LookupRequest, gaps: PartialHit) -> None:
        self._gaps = gaps
        parts, self._inverses = [], []
        for each in gaps.tables:
            unique, inverse = dedup(each.missing())
            parts.append(Part.make(each.table, unique))
            self._inverses.append(inverse)
        super().__init__(request, parts, gaps.started)

    def asked(self, part: Part) -> int:
        keys = next(each.keys for each in self._gaps.tables if each.table is part.table)
        return len(dedup(keys())[0])

    def answer(self) -> tuple[LookupResult, Answers] | None:
        result = LookupResult(self._gaps.vectors, degraded=self.degraded)
        answers = list(self._gaps.answers)
        for gaps, part, inverse in zip(self._gaps.tables, self.parts, self._inverses, strict=True):
            has_defaults = fill_defaults(part, part.source.tobytes())
            codes = np.frombuffer(bytearray(answers[gaps.position][1]), np.uint8)
            if not self._fill(gaps, part, inverse, codes):
                return None
            told = codes.tobytes()
            if has_defaults:
                result.defaulted += told.count(_DEFAULT)
            answers[gaps.position] = gaps.table, told, answers[gaps.position][2]
        return result, answers

    def _fill(
        self, gaps: TablePartialHit, part: Part, inverse: IndexArray, codes: SourceArray
    ) -> bool:
        """Complete the table's bags and the ``codes`` of its keys ``(n,)``; False when rows got lost."""
        start = 0
        for first, bags in gaps.bags:
            assert bags.missing is not None
            mine = inverse[start : start + len(bags.missing)]
            codes[bags.missing + first] = part.source[mine]
            if not self._gaps.tier.complete(bags, part.out[mine]):
                return False
            start += len(mine)
        return True
