"""Partial hits of the fast path: only the rows of bags that memory misses are fetched.

A bag with a missing row is pooled again once the row has arrived. Adding the row at the end would
change the order of the sum, and a vector's last bits would depend on what was in memory; vectors of
float16 tables would be rounded twice. The rows that are read twice are in the CPU's cache by then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hps.lookup.lookup_job import LookupJob, with_defaults
from hps.native import dedup
from hps.observability.meters import Answers
from hps.tiers.base import Bags, Part
from hps.tiers.fused_lookup import FusedLookup
from hps.types import (
    EmbeddingTable,
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
    """The incomplete bags of one table.

    ``position``: the table's, in the request; ``bags``: each after the position of its first key among
    all keys of the table; ``keys``: returns all these keys ``(n,)``."""

    table: EmbeddingTable
    position: int
    bags: Sequence[tuple[int, Bags]]
    keys: Callable[[], KeyArray]

    def missing(self) -> KeyArray:
        """The keys that have no row, possibly repeated."""
        flat = [bags.keys[bags.missing] for _, bags in self.bags]
        return flat[0] if len(flat) == 1 else np.concatenate(flat)


@dataclass(frozen=True, slots=True)
class PartialHit:
    """A request that memory answered except for some rows.

    ``tables``: those with missing rows; ``answers``: of all tables, as if no row were missing;
    ``vectors``: by feature; `PartialHitJob` completes them in place. ``stored_rows``: see `LookupResult`."""

    tier: FusedLookup
    tables: Sequence[TablePartialHit]
    answers: Answers
    vectors: dict[str, VectorArray]
    started: float
    stored_rows: bool = False


class PartialHitJob(LookupJob):
    """A lookup that completes a partial hit: each missing key is fetched once."""

    __slots__ = ("_hit", "_inverses")

    def __init__(self, request: LookupRequest, hit: PartialHit) -> None:
        self._hit = hit
        parts, self._inverses = [], []
        for each in hit.tables:
            unique, inverse = dedup(each.missing())
            parts.append(Part.make(each.table, unique))
            self._inverses.append(inverse)
        super().__init__(request, parts, hit.started)

    def distinct_keys(self, part: Part) -> int:
        keys = next(each.keys for each in self._hit.tables if each.table is part.table)
        return len(dedup(keys())[0])

    def answer(self) -> tuple[LookupResult, Answers] | None:
        result = LookupResult(self._hit.vectors, degraded=self.degraded)
        result.stored_rows = self._hit.stored_rows
        answers = list(self._hit.answers)
        for table_hit, part, inverse in zip(
            self._hit.tables, self.parts, self._inverses, strict=True
        ):
            vectors, has_defaults = with_defaults(part, part.source.tobytes(), dtype=np.float32)
            codes = np.frombuffer(bytearray(answers[table_hit.position][1]), np.uint8)
            if not self._fill(table_hit, part.source[inverse], vectors[inverse], codes):
                return None
            table_codes = codes.tobytes()
            if has_defaults:
                result.defaulted += table_codes.count(_DEFAULT)
            answers[table_hit.position] = (
                table_hit.table,
                table_codes,
                answers[table_hit.position][2],
            )
        return result, answers

    def _fill(
        self,
        table_hit: TablePartialHit,
        sources: SourceArray,
        vectors: VectorArray,
        codes: SourceArray,
    ) -> bool:
        """Complete the table's bags and the ``codes`` of its keys ``(n,)``; False if rows were evicted.

        ``sources (m,)`` and ``vectors (m, dim)``: of the missing keys of all bags."""
        start = 0
        for first, bags in table_hit.bags:
            assert bags.missing is not None
            some = slice(start, start + len(bags.missing))
            codes[bags.missing + first] = sources[some]
            if not self._hit.tier.complete(bags, vectors[some]):
                return False
            start = some.stop
        return True
